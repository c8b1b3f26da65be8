"""One check for every schedule: each op once, after its inputs, in a slot of its own."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from olmo_jax.parallel.pipeline.schedule import Schedule, stages_of


class _Op(NamedTuple):
    """One entry of a table, as messages name it."""

    tick: int
    kind: str
    rank: int
    stage: int
    microbatch: int
    slot: int

    def __str__(self) -> str:
        return (
            f"{self.kind}(stage {self.stage}, microbatch {self.microbatch}) "
            f"in tick {self.tick} on rank {self.rank}"
        )


_Found = dict[tuple[str, int, int], _Op]
"""Ops by kind, stage and microbatch."""


class _Need(NamedTuple):
    """An op comes exactly, or at least, `ticks` after `kind` of the stage that is `offset` away."""

    kind: str
    offset: int
    exactly: bool
    ticks: int


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule if it can be run as it says.

    Raises: ValueError that names the op, its tick and its rank.
    """
    for message in _faults(schedule):
        raise ValueError(f"{schedule.name} schedule: {message}")
    return schedule


def _faults(schedule: Schedule) -> Iterator[str]:
    """Yield what is wrong; each check may rely on those before it."""
    yield from _shape_faults(schedule)
    yield from _range_faults(schedule)
    ops = _in_order(schedule)
    yield from _count_faults(schedule, ops)
    yield from _input_faults({(op.kind, op.stage, op.microbatch): op for op in ops})
    yield from _slot_faults(schedule, ops)


def _shape_faults(schedule: Schedule) -> Iterator[str]:
    sizes = (schedule.ranks, schedule.chunks, schedule.microbatches, schedule.num_ticks)
    if min(sizes) < 1:
        yield f"ranks, chunks, microbatches and ticks are {sizes}, but each must be 1 or more"
    shape = (schedule.num_ticks, schedule.ranks)
    for kind, ops in (("F", schedule.forward), ("B", schedule.backward)):
        for name, table in ops._asdict().items():
            dtype = np.dtype(np.bool_ if name == "valid" else np.int32)
            if table.shape != shape or table.dtype != dtype:
                given = f"{table.dtype}{list(table.shape)}"
                yield f"{kind} {name} is {given}, but must be {dtype}{list(shape)}"


def _range_faults(schedule: Schedule) -> Iterator[str]:
    """Numbers must be able to index, those of idle entries too."""
    ends = {
        "chunk": schedule.chunks,
        "microbatch": schedule.microbatches,
        "slot": max(schedule.num_slots, 1),
    }
    for kind, ops in (("F", schedule.forward), ("B", schedule.backward)):
        for name, end in ends.items():
            table = getattr(ops, name)
            wrong = (table < 0) | (table >= np.where(ops.valid, end, 1))
            for tick, rank in np.argwhere(wrong).tolist():
                rule = f"0 to {end - 1}" if ops.valid[tick, rank] else "0, as it is idle"
                given = f"{name} {table[tick, rank]}"
                yield f"{kind} in tick {tick} on rank {rank} has {given}, but must have {rule}"


def _in_order(schedule: Schedule) -> list[_Op]:
    """Return all ops by tick, forwards first."""
    stages = stages_of(schedule.ranks, schedule.chunks)
    ops = []
    for kind, tables in (("F", schedule.forward), ("B", schedule.backward)):
        for tick, rank in np.argwhere(tables.valid).tolist():
            chunk, microbatch, slot = (int(table[tick, rank]) for table in tables[1:])
            ops.append(_Op(tick, kind, rank, int(stages[rank, chunk]), microbatch, slot))
    return sorted(ops, key=lambda op: (op.tick, op.kind == "B"))


def _count_faults(schedule: Schedule, ops: list[_Op]) -> Iterator[str]:
    """Each stage must run each microbatch once; a table can only name stages of its rank."""
    found: _Found = {}
    for op in ops:
        first = found.setdefault((op.kind, op.stage, op.microbatch), op)
        if first is not op:
            yield f"{op} runs a second time, but ran in tick {first.tick}"
    kinds = 1 if schedule.forward_only else 2
    for kind, stage, microbatch in np.ndindex(kinds, schedule.num_stages, schedule.microbatches):
        if ("FB"[kind], stage, microbatch) not in found:
            op = f"{'FB'[kind]}(stage {stage}, microbatch {microbatch})"
            yield f"{op} is missing: it runs in no tick on rank {stage % schedule.ranks}"


_NEEDS = {
    # What a neighbour sends arrives in one buffer, which every tick overwrites: the next tick uses
    # it, or it is lost.
    "F": [_Need("F", -1, exactly=True, ticks=1)],
    # A tick runs its forward first, so a backward can use residuals of the same tick.
    "B": [_Need("B", 1, exactly=True, ticks=1), _Need("F", 0, exactly=False, ticks=0)],
}


def _input_faults(found: _Found) -> Iterator[str]:
    for op in found.values():
        for kind, offset, exactly, ticks in _NEEDS[op.kind]:
            source = found.get((kind, op.stage + offset, op.microbatch))
            if source is None:
                continue
            passed = op.tick - source.tick
            if passed < ticks or (exactly and passed != ticks):
                rule = f"{ticks} tick" if exactly else f"{ticks} or more ticks"
                yield f"{op} must come {rule} after its input, {source}"


def _slot_faults(schedule: Schedule, ops: list[_Op]) -> Iterator[str]:
    """A slot must hold one activation from its forward to its backward, and none be spare."""
    if schedule.forward_only:
        yield from _slots_without_backward(schedule, ops)
        return
    # The schedule replayed: `ops` are in order of ticks, in a tick all forwards first.
    held: dict[tuple[int, int], _Op] = {}
    live, peak = Counter[int](), 0
    for op in ops:
        holder = held.pop((op.rank, op.slot), None)
        if op.kind == "F":
            held[op.rank, op.slot] = op
            if holder:
                yield f"{op} takes slot {op.slot}, which holds {holder}"
        elif not holder or (holder.stage, holder.microbatch) != (op.stage, op.microbatch):
            yield f"{op} reads slot {op.slot}, which holds {holder or 'nothing'}"
        live[op.rank] += 1 if op.kind == "F" else -1
        peak = max(peak, live[op.rank])
    if peak != schedule.num_slots:
        yield f"num_slots={schedule.num_slots}, but at most {peak} are in use on any rank"


def _slots_without_backward(schedule: Schedule, ops: list[_Op]) -> Iterator[str]:
    """Nothing is saved where there is no backward."""
    for op in ops:
        if op.kind == "B":
            yield f"{op} stands in a schedule that has forwards only"
    if schedule.num_slots:
        yield f"num_slots={schedule.num_slots}, but forwards alone save nothing"
