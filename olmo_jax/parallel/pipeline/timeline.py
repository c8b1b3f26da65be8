"""A schedule in time, a forward 1 unit and a backward 2: bubble, live activations."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from olmo_jax.parallel.pipeline.schedule import Schedule, ticks_of

FORWARD_UNITS = 1
BACKWARD_UNITS = 2


class Timeline(NamedTuple):
    """When each op starts, and when the last one ends. Units: a forward.

    Where a schedule has no backward, its starts are -1.
    """

    forward: Int[np.ndarray, "stages microbatches"]
    backward: Int[np.ndarray, "stages microbatches"]
    length: int


def timeline(schedule: Schedule) -> Timeline:
    """Return the starts of all ops.

    A tick takes as long as what any rank does in it: 1 in warm-up, 2 in cool-down, 3 between.
    """
    forward = ticks_of(schedule, schedule.forward)
    backward = ticks_of(schedule, schedule.backward)
    forward_units = FORWARD_UNITS * schedule.forward.valid.any(axis=1)
    units = forward_units + BACKWARD_UNITS * schedule.backward.valid.any(axis=1)
    starts = np.cumsum(units) - units
    backward = backward if schedule.forward_only else (starts + forward_units)[backward]
    return Timeline(starts[forward], backward, int(units.sum()))


def bubble(schedule: Schedule) -> Fraction:
    """Return the part of the time in which a rank has nothing to do, the same for every rank."""
    units = FORWARD_UNITS if schedule.forward_only else FORWARD_UNITS + BACKWARD_UNITS
    busy = units * schedule.chunks * schedule.microbatches
    return 1 - Fraction(busy, timeline(schedule).length)


def live(schedule: Schedule) -> Int[np.ndarray, "ticks ranks"]:
    """Return how many chunk activations each rank holds after the forward of each tick."""
    if schedule.forward_only:
        return np.zeros((schedule.num_ticks, schedule.ranks), np.int64)
    # The tick's own backward is not subtracted: it runs after the forward and reads its residuals.
    forwards, backwards = schedule.forward.valid, schedule.backward.valid
    return np.cumsum(forwards, axis=0) - (np.cumsum(backwards, axis=0) - backwards)


def peak_live(schedule: Schedule) -> Int[np.ndarray, "ranks"]:
    """Return the most chunk activations that each rank ever holds."""
    return live(schedule).max(axis=0)
