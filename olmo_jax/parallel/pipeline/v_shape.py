"""1F1B on the V placement: rank r runs stages r and 2P-1-r, and all ranks hold the same.

A pattern of two forwards (1 unit each) and two backwards (2 units each) repeats on every rank
every 6 units, one period a microbatch, and never collides with itself. Its start and end have
gaps; one pass over the ops in order of time moves each to the earliest place that its inputs and
the order of microbatches allow, forwards only as long as no rank holds more than the pattern does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from olmo_jax.errors import UserError
from olmo_jax.parallel.pipeline.schedule import Schedule, from_ticks, ranks_of, require_counts

PERIOD = 6
"""Units of a microbatch on a rank: two forwards of 1 and two backwards of 2."""


class _Times(NamedTuple):
    """When ops start, and what that means for each rank: changed in place by the pass."""

    forward: Int[np.ndarray, "stages microbatches"]
    backward: Int[np.ndarray, "stages microbatches"]
    busy: Bool[np.ndarray, "ranks units"]
    live: Int[np.ndarray, "ranks units"]


def one_f_one_b_v(
    ranks: int, chunks: int, microbatches: int, *, extra_activations: Sequence[int] = ()
) -> Schedule:
    """Return 1F1B-V; forwards of rank r may raise its peak by `extra_activations[r]`.

    Raises: UserError for other than two chunks, or extra activations that do not fit the ranks.
    Source: olmo_core 3.0.0, train/train_module/transformer/pipeline/pipeline_schedule.py
        (CustomSchedule1F1BV: the pattern, the pass, forward_pull_ahead_extra_activations).
    Differs: the pattern has a closed form here. The tables are the same.
    """
    require_counts(ranks, chunks, microbatches)
    rank_of = ranks_of("v", ranks, chunks)
    extra = _require_extra(ranks, extra_activations)
    forward, backward = _pattern(ranks, microbatches)
    times = _occupancy(forward, backward, rank_of)
    caps = times.live.max() + extra
    for is_backward, stage, microbatch in _in_order(forward, backward, rank_of):
        rank = int(rank_of[stage])
        if is_backward:
            _pull_backward(times, rank, stage, microbatch)
        else:
            _pull_forward(times, rank, stage, microbatch, int(caps[rank]))
    return from_ticks("v", "v", ranks, forward, backward, lockstep=False)


def _require_extra(ranks: int, extra: Sequence[int]) -> Int[np.ndarray, "ranks"]:
    if extra and (len(extra) != ranks or min(extra) < 0):
        raise UserError(
            f"extra_activations={list(extra)}, but each of the {ranks} ranks needs one number, "
            f"0 or more; use {[1] * ranks} for instance"
        )
    return np.array(extra or [0] * ranks)


def _pattern(
    ranks: int, microbatches: int
) -> tuple[Int[np.ndarray, "stages microbatches"], Int[np.ndarray, "stages microbatches"]]:
    """Return the starts of forwards and backwards in the repeated pattern.

    A forward enters stage s after s units. Backwards follow one another without a gap but for 3
    units after every third, so that the two of a rank meet neither each other nor a forward
    modulo 6; the first such pause depends on the number of ranks modulo 3.
    """
    periods = PERIOD * np.arange(microbatches)
    stages = np.arange(2 * ranks)
    pauses = (ranks % 3 == 0) + ((1 - ranks) % 3 + stages) // 3
    backward = 2 * ranks + 2 * stages + 3 * pauses
    return stages[:, None] + periods, backward[::-1, None] + periods


def _occupancy(
    forward: Int[np.ndarray, "stages microbatches"],
    backward: Int[np.ndarray, "stages microbatches"],
    rank_of: Int[np.ndarray, "stages"],
) -> _Times:
    """Return the times with what each rank does and holds.

    An activation is held from its forward to the first unit of its backward: in the second
    the rank is busy, so no forward can need the place.
    """
    shape = (len(rank_of) // 2, int(backward.max()) + 2)
    busy, live = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
    for (stage, _), start in np.ndenumerate(forward):
        busy[rank_of[stage], start] = True
    for (stage, microbatch), start in np.ndenumerate(backward):
        busy[rank_of[stage], start : start + 2] = True
        live[rank_of[stage], forward[stage, microbatch] : start + 1] += 1
    return _Times(forward, backward, busy, live)


def _in_order(
    forward: Int[np.ndarray, "stages microbatches"],
    backward: Int[np.ndarray, "stages microbatches"],
    rank_of: Int[np.ndarray, "stages"],
) -> list[tuple[bool, int, int]]:
    """Return all ops as (is backward, stage, microbatch) in order of time, then rank."""
    kind, stage, microbatch = np.indices((2, *forward.shape)).reshape(3, -1)
    starts = np.concatenate([forward.ravel(), backward.ravel()])
    order = np.lexsort([rank_of[stage], starts])
    return [(bool(kind[i]), int(stage[i]), int(microbatch[i])) for i in order]


def _pull_forward(times: _Times, rank: int, stage: int, microbatch: int, cap: int) -> None:
    """Move a forward ahead as far as the rank holds fewer than `cap` all the way."""
    start, busy, live = times.forward, times.busy[rank], times.live[rank]
    now = place = int(start[stage, microbatch])
    inputs = start[stage - 1, microbatch] if stage else -1
    earliest = 1 + max(inputs, start[stage, microbatch - 1] if microbatch else -1)
    while place > earliest and live[place - 1] < cap:
        place -= 1
    while place < now and busy[place]:
        place += 1
    busy[now], busy[place] = False, True
    live[place:now] += 1
    start[stage, microbatch] = place


def _pull_backward(times: _Times, rank: int, stage: int, microbatch: int) -> None:
    """Move a backward to the first two free units after its inputs."""
    start, busy = times.backward, times.busy[rank]
    now = int(start[stage, microbatch])
    is_last = stage == len(start) - 1
    place = times.forward[stage, microbatch] + 1 if is_last else start[stage + 1, microbatch] + 2
    if microbatch:
        place = max(place, start[stage, microbatch - 1] + 2)
    busy[now : now + 2] = False
    while busy[place : place + 2].any():
        place += 1
    busy[place : place + 2] = True
    times.live[rank, place + 1 : now + 1] -= 1
    start[stage, microbatch] = place
