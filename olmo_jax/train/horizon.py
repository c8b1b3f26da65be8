"""Where a schedule ends, and its warm-up: a run that resumes never warms up again."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from olmo_jax.checkpoint import Position, Saved
from olmo_jax.config.messages import listing
from olmo_jax.config.records import Config, ScheduleConfig, TrainConfig
from olmo_jax.optim.schedule import learning_rate, with_warmup_of
from olmo_jax.rules.resume_policy import changes

FACT = "first_horizon"
"""The name under which a checkpoint keeps the horizon that its run began with."""

_DECAYING = ("linear", "cosine", "wsd")
_CAUSES = ("train.steps", "train.global_batch", "train.sequence_length", "optim.schedule.horizon")


class Horizon(NamedTuple):
    """A length of the schedule, in its unit."""

    length: int
    unit: str

    def __str__(self) -> str:
        return f"{self.length} {self.unit}"


def totals(train: TrainConfig, done: Position) -> dict[str, int]:
    """Return the steps and tokens of a whole run that continues like this after `done`.

    No position is padding: every row of the training data is full.
    """
    left = train.steps - done.step
    tokens = done.tokens + left * train.global_batch * train.sequence_length
    return {"total_steps": train.steps, "total_tokens": tokens}


def of_run(config: Config, done: Position) -> Horizon:
    """Return the horizon of a run that continues after `done`."""
    schedule = config.optim.schedule
    return Horizon(schedule.end(**totals(config.train, done)), schedule.unit)


def of_checkpoint(earlier: Saved) -> Horizon:
    """Return the horizon of the run that wrote a checkpoint: the same after each of its steps."""
    train = _read(TrainConfig(), earlier.config, "train")
    schedule = _read(ScheduleConfig(), earlier.config, "optim", "schedule")
    return Horizon(schedule.end(**totals(train, earlier.position)), schedule.unit)


def _read(default: Any, config: Mapping[str, Any], *sections: str) -> Any:
    """Return what a checkpoint's config has of the keys that are known; others kept no length."""
    for section in sections:
        config = config.get(section, {})
    return default.model_copy(update={k: v for k, v in config.items() if hasattr(default, k)})


def first(config: Config, earlier: Saved | None) -> Horizon:
    """Return the horizon that a run began with, in the unit of its schedule now.

    A checkpoint that does not keep it is one of an older version: it has the horizon of the run
    that wrote it. In another unit the run begins here.
    """
    if earlier is None:
        return of_run(config, Position(0, 0, 0))
    kept = of_checkpoint(earlier)
    if FACT in earlier.facts:
        length, unit = earlier.facts[FACT].split()
        kept = Horizon(int(length), unit)
    is_same = kept.unit == config.optim.schedule.unit
    return kept if is_same else of_run(config, earlier.position)


def settled(config: Config, begun: Horizon) -> Config:
    """Return the config with the warm-up as a count: that of the horizon the run began with."""
    optim = with_warmup_of(config.optim, begun.length)
    return config.model_copy(update={"optim": optim})


def said(earlier: Saved, config: Config) -> Iterator[str]:
    """Yield how a resumed run moves the end of its schedule: a decay that ends with the run.

    The next step's rate is named, and the one that the old end gives.
    """
    done, before, now = earlier.position, of_checkpoint(earlier), of_run(config, earlier.position)
    moved = before.unit == now.unit and before != now
    if not moved or config.optim.schedule.kind not in _DECAYING:
        return
    optim = settled(config, first(config, earlier)).optim
    kept = optim.schedule.model_copy(update={"horizon": before.length})
    rate = partial(
        learning_rate,
        step=done.step + 1,
        tokens=done.tokens + config.train.global_batch * config.train.sequence_length,
        **totals(config.train, done),
    )
    causes = [change.key for change in changes(earlier.config, config) if change.key in _CAUSES]
    yield (
        f"the schedule ends at {now} and no longer at {before}, because {listing(causes, 'and')} "
        f"changed: the next step has the rate {rate(optim):.4g}, and "
        f"{rate(optim.model_copy(update={'schedule': kept})):.4g} with "
        f"optim.schedule.horizon={before.length}; the warm-up is still that of the run's start, "
        f"{optim.schedule.warmup} {now.unit}"
    )
