"""A schedule whose end moves as a run resumes: the warm-up stays, and the move is said."""

import itertools
from typing import Any

import pytest
from etils import epath

from olmo_jax.checkpoint import Position, Saved
from olmo_jax.config import Config
from olmo_jax.optim.schedule import learning_rate
from olmo_jax.train import horizon, resume_checks
from olmo_jax.train.loop import Upcoming, upcoming
from tests.train.test_training_run import Rows

LR = 1.0
KINDS = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


def config_of(steps: int = 40, global_batch: int = 2, length: int = 4, **schedule: Any) -> Config:
    train = {"steps": steps, "global_batch": global_batch, "sequence_length": length}
    schedule = {"unit": "tokens", "warmup_fraction": 0.25, **schedule}
    return Config.model_validate({"train": train, "optim": {"lr": LR, "schedule": schedule}})


def steps_of(config: Config, earlier: Saved | None = None) -> list[Upcoming]:
    """Return the steps that a run takes, from a checkpoint on if there is one."""
    settled = horizon.settled(config, horizon.first(config, earlier))
    done = earlier.position if earlier else Position(0, 0, 0)
    # The type of the corpus is checked at the call, so the function beneath the check is taken.
    return list(getattr(upcoming, "__wrapped__", upcoming)(settled, Rows(), [0], done))


def saved(config: Config, after: int, earlier: Saved | None = None) -> Saved:
    """Return the checkpoint that a run writes when it has taken so many steps."""
    return Saved(
        position=steps_of(config, earlier)[after - 1].position,
        seed=0,
        config=config.model_dump(mode="json"),
        facts={horizon.FACT: str(horizon.first(config, earlier))},
        leaves={},
        written="2026-01-01T00:00:00+00:00",
        folder=epath.Path("runs/x/checkpoints/step_1"),
    )


def rates(steps: list[Upcoming]) -> dict[int, float]:
    """Return the learning rate by the tokens that it brings."""
    return {step.position.tokens: step.lr for step in steps}


OTHERS = {
    "a larger batch": {"global_batch": 8},
    "a smaller batch": {"global_batch": 1},
    "longer rows": {"length": 16},
    "more steps": {"steps": 400},
    "fewer steps": {"steps": 30},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["tokens", "steps"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("after", [3, 25])
def test_a_warmup_is_over_once_whatever_the_run_resumes_with(kind, unit, other, after):
    """10 of 40 steps: interrupted in it and past it."""
    config = config_of(kind=kind, unit=unit)
    resumed = config_of(kind=kind, unit=unit, **OTHERS[other])
    steps = steps_of(resumed, saved(config, after))
    begun = 10 if unit == "steps" else 80
    count = [getattr(s.position, "step" if unit == "steps" else "tokens") for s in steps]
    rising = [step.lr for step, n in zip(steps, count, strict=True) if n <= begun]
    assert rising == pytest.approx([n / begun * LR for n in count if n <= begun], rel=1e-12)
    falling = [step.lr for step, n in zip(steps, count, strict=True) if n >= begun]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    if kind in ("constant", "inverse_sqrt"):  # nothing else is measured by the end of the run
        optim = config_of(kind=kind, unit=unit, warmup=begun, warmup_fraction=None).optim
        for position, _, lr in steps:
            at = {"step": position.step, "tokens": position.tokens}
            assert lr == learning_rate(optim, **at, total_steps=1, total_tokens=1)


def test_tokens_and_a_larger_batch_do_not_warm_up_again():
    """The trial of issue 12: past the warm-up, then a batch four times as large."""
    config = config_of(kind="constant")
    later = steps_of(config_of(kind="constant", global_batch=8), saved(config, 20))
    assert {step.lr for step in later} == {LR}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_config_goes_on_with_the_same_rates_and_says_nothing(kind):
    config = config_of(kind=kind)
    earlier = saved(config, 15)
    assert steps_of(config, earlier) == steps_of(config)[15:]
    assert list(horizon.said(earlier, config)) == []


def test_a_run_that_resumes_twice_keeps_the_warmup_that_it_began_with():
    first, longer = config_of(), config_of(400)
    once = saved(first, 20)
    twice = saved(longer, 5, once)
    assert steps_of(longer, twice) == steps_of(longer, once)[5:]
    assert list(horizon.said(twice, longer)) == []


def test_a_checkpoint_of_an_older_version_has_the_horizon_of_its_own_config():
    config, longer = config_of(), config_of(400)
    earlier = saved(config, 20)
    older = Saved(**{**vars(earlier), "facts": {}})
    assert steps_of(longer, older) == steps_of(longer, earlier)


def test_an_end_that_moves_is_said_with_both_rates_and_the_key_that_keeps_it():
    earlier, larger = saved(config_of(kind="linear"), 20), config_of(kind="linear", global_batch=8)
    [text] = horizon.said(earlier, larger)
    assert text in list(resume_checks.said(earlier, larger, []))
    now = steps_of(larger, earlier)[0].lr
    kept = steps_of(config_of(kind="linear", global_batch=8, horizon=320), earlier)
    assert (
        "ends at 800 tokens and no longer at 320 tokens, because train.global_batch changed" in text
    )
    assert f"the rate {now:.4g}, and {kept[0].lr:.4g} with optim.schedule.horizon=320" in text
    assert "80 tokens" in text
    # With that key the rate follows the tokens as if nothing had changed.
    whole = rates(steps_of(config_of(kind="linear")))
    assert {t: lr for t, lr in rates(kept).items() if t <= 320}.items() <= whole.items()


@pytest.mark.parametrize("kind", ["constant", "inverse_sqrt"])
def test_an_end_that_nothing_is_measured_by_is_not_said(kind):
    assert not list(horizon.said(saved(config_of(kind=kind), 20), config_of(400, kind=kind)))
