"""A pipeline schedule as plain NumPy tables: what each rank runs in each tick. No jax."""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from olmo_jax.errors import UserError


class Ops(NamedTuple):
    """At most one forward (or backward) per tick and rank; where `valid` is false all else is 0."""

    valid: Bool[np.ndarray, "ticks ranks"]
    chunk: Int32[np.ndarray, "ticks ranks"]
    microbatch: Int32[np.ndarray, "ticks ranks"]
    slot: Int32[np.ndarray, "ticks ranks"]
    """Where the residuals are: the forward writes it, and it is free after the backward."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One optimizer step of a pipeline.

    A tick is at most one forward and then one backward chunk on every rank. A tensor that a rank
    sends arrives for the next tick. Stage c*P + r is chunk c of rank r.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    num_slots: int
    forward: Ops
    backward: Ops
    forward_only: bool = False
    """Evaluation: no backward, and no slot is used."""

    @property
    def num_stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def num_ticks(self) -> int:
        return len(self.forward.valid)


def require_counts(ranks: int, chunks: int, microbatches: int) -> None:
    """Check that every count is positive.

    Raises: UserError, naming the first that is not.
    """
    counts = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name}={count}, but a pipeline needs 1 or more; use {name}=1")


def stages_of(ranks: int, chunks: int) -> Int[np.ndarray, "ranks chunks"]:
    """Return the stage that each rank runs as each of its chunks.

    Source: olmo_core 3.0.0, train/train_module/transformer/pipeline/helpers.py.
    """
    # P=3, V=2: rank 0 has stages 0 and 3, rank 1 has 1 and 4, rank 2 has 2 and 5. A stage's output
    # always goes to the next rank, the last rank's to the first.
    return np.arange(chunks * ranks).reshape(chunks, ranks).T


def from_ticks(
    name: str,
    ranks: int,
    forward: Int[np.ndarray, "stages microbatches"],
    backward: Int[np.ndarray, "stages microbatches"] | None,
) -> Schedule:
    """Return the schedule that runs each op in the tick given for it, with a slot for each.

    Without `backward` nothing is saved: there are no slots, and no backward ops.
    """
    num_stages, microbatches = forward.shape
    chunks = num_stages // ranks
    stages = stages_of(ranks, chunks)
    starts = forward[stages]
    if backward is None:
        ends = read = np.zeros((ranks, 0, 0), np.int64)
        slots, num_slots, num_ticks = np.zeros_like(starts), 0, int(forward.max()) + 1
    else:
        ends = backward[stages]
        slots = np.stack([_slots(*lives) for lives in zip(starts, ends, strict=True)])
        read, num_slots = slots, int(slots.max()) + 1
        num_ticks = int(backward.max()) + 1
    return Schedule(
        name=name,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        num_slots=num_slots,
        forward=_ops(num_ticks, starts, slots),
        backward=_ops(num_ticks, ends, read),
        forward_only=backward is None,
    )


def _slots(
    starts: Int[np.ndarray, "chunks microbatches"], ends: Int[np.ndarray, "chunks microbatches"]
) -> Int[np.ndarray, "chunks microbatches"]:
    """Return the lowest slot that is free, for lives of one rank, both ticks included.

    Taken in order of their starts, intervals need no more slots than are ever alive at once.
    """
    # Colouring of intervals: `alive` is a heap of (end, slot), `free` a heap of slots. Together
    # they hold all slots so far, so if none is free the next new one is number len(alive).
    slots = np.zeros(starts.size, np.int64)
    alive: list[tuple[int, int]] = []
    free: list[int] = []
    for op in np.argsort(starts, axis=None):
        # Not <=: in a tick the forward comes first, so a backward of this tick frees nothing yet.
        while alive and alive[0][0] < starts.flat[op]:
            heapq.heappush(free, heapq.heappop(alive)[1])
        slots[op] = heapq.heappop(free) if free else len(alive)
        heapq.heappush(alive, (int(ends.flat[op]), int(slots[op])))
    return slots.reshape(starts.shape)


def _ops(
    num_ticks: int,
    ticks: Int[np.ndarray, "ranks chunks microbatches"],
    slots: Int[np.ndarray, "ranks chunks microbatches"],
) -> Ops:
    rank, chunk, microbatch = np.indices(ticks.shape)
    shape = (num_ticks, len(ticks))
    ops = Ops(np.zeros(shape, np.bool_), *(np.zeros(shape, np.int32) for _ in range(3)))
    for table, values in zip(ops, (True, chunk, microbatch, slots), strict=True):
        table[ticks, rank] = values
    return ops


def ticks_of(schedule: Schedule, ops: Ops) -> Int[np.ndarray, "stages microbatches"]:
    """Return the tick in which each stage runs each microbatch, -1 where it never does."""
    stages = stages_of(schedule.ranks, schedule.chunks)
    ticks = np.full((schedule.num_stages, schedule.microbatches), -1)
    tick, rank = np.nonzero(ops.valid)
    ticks[stages[rank, ops.chunk[tick, rank]], ops.microbatch[tick, rank]] = tick
    return ticks
