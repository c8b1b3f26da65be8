"""The learning rate over time, in plain Python: it enters the compiled step as one number."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from olmo_jax.config.records import OptimConfig, ScheduleConfig


class Stretch(NamedTuple):
    """A part of a schedule that goes from `start` (None: where the last one ended) to `end`."""

    duration: int
    end: float
    start: float | None = None
    shape: str = "linear"


def with_warmup_of(optim: OptimConfig, horizon: int) -> OptimConfig:
    """Return the same with the warm-up as a count, as its fraction of this horizon."""
    schedule = optim.schedule
    warmup = schedule.warmup_length(horizon)
    settled = schedule.model_copy(update={"warmup": warmup, "warmup_fraction": None})
    return optim.model_copy(update={"schedule": settled})


def _between(start: float, end: float, count: int, duration: int, shape: str) -> float:
    if shape == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * count / duration)) / 2
    return start + (end - start) * count / duration


def piecewise(stretches: Iterable[Stretch], count: int, first: float) -> float:
    """Return the value at `count` of stretches in a row; the last value is held.

    A stretch owns its last point: a jump shows one unit after the border.
    """
    value = first
    for stretch in stretches:
        start = value if stretch.start is None else stretch.start
        if count < stretch.duration:
            return _between(start, stretch.end, count, stretch.duration, stretch.shape)
        if count == stretch.duration:
            return stretch.end
        count, value = count - stretch.duration, stretch.end
    return value


def _stretches(schedule: ScheduleConfig, lr: float, warmup: int, horizon: int) -> list[Stretch]:
    """Return every kind but `inverse_sqrt` as warm-up and what follows it."""
    final = schedule.final * lr
    rise = Stretch(warmup, lr)
    rest = max(horizon - warmup, 0)
    if schedule.kind in ("linear", "cosine"):
        return [rise, Stretch(rest, final, lr, schedule.kind)]
    if schedule.kind == "wsd":
        decay = min(schedule.decay_length(horizon), rest)
        return [rise, Stretch(rest - decay, lr), Stretch(decay, final)]
    return [rise]


def _composed(schedule: ScheduleConfig, lr: float) -> list[Stretch]:
    return [
        Stretch(
            stage.duration,
            stage.end * lr,
            None if stage.start is None else stage.start * lr,
            stage.shape,
        )
        for stage in schedule.stages
    ]


def learning_rate(
    optim: OptimConfig, *, step: int, tokens: int, total_steps: int, total_tokens: int
) -> float:
    """Return the learning rate of step number `step`, which brings `tokens` in all.

    Warm-up is a line from `warmup_start * lr` to `lr`; `linear` and `cosine` reach `final * lr` at
    the horizon, `wsd` falls to it over the last `decay`, all three then stay there. `inverse_sqrt`
    is `final * lr + (1 - final) * lr * sqrt(warmup / count)` and has no end. `composable` reads
    nothing but its stages; the first one starts at `warmup_start` unless it says where.

    Units: `step` counts from 1 and `tokens` includes this step's own.
    Source: olmo_core 3.0.0, optim/scheduler.py.
    Differs: the two ends of the curve are fractions of lr (there: the warm-up's start and WSD's end
    are absolute rates), and WSD holds its last value past the horizon.
    """
    schedule, lr = optim.schedule, optim.lr
    count = tokens if schedule.unit == "tokens" else step
    horizon = schedule.end(total_steps=total_steps, total_tokens=total_tokens)
    first = schedule.warmup_start * lr
    if schedule.kind == "composable":
        return piecewise(_composed(schedule, lr), count, first)
    warmup = schedule.warmup_length(horizon)
    if schedule.kind == "inverse_sqrt" and count > warmup:
        final = schedule.final * lr
        return final + (lr - final) * math.sqrt(warmup / count)
    return piecewise(_stretches(schedule, lr, warmup, horizon), count, first)
