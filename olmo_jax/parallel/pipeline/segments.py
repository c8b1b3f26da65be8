"""A schedule as static segments: loops over ticks of one kind, and periods that repeat.

Pure NumPy. A program has one copy of a tick's work per segment, however many the microbatches are.
Between the ticks stand the group events: the first part (embedding, leading blocks) runs a group of
as many microbatches as there are ranks at once, one a rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from olmo_jax.parallel.pipeline.schedule import Ops, Schedule, ticks_of

MOST_STEPS_OF_A_PERIOD = 8
"""A period has at most 4: first forward, ticks with a loss, first backward, ticks without."""


@dataclass(frozen=True)
class Ticks:
    """The ticks from `start` to before `stop`, all alike in what some rank does in them.

    `loss`: the last rank runs its last chunk forward. `turn`: it runs it backward.
    """

    start: int
    stop: int
    forward: bool
    loss: bool
    turn: bool
    backward: bool


@dataclass(frozen=True)
class FirstForward:
    """The first part's forward of a group of microbatches, before the body needs it."""

    group: int


@dataclass(frozen=True)
class FirstBackward:
    """Its backward, after the body has returned all gradients of the group."""

    group: int


Step = Ticks | FirstForward | FirstBackward

RepeatedSteps = tuple[tuple[Step, ...], ...]
"""Iterations over like steps; one program runs them all."""


class Segments(NamedTuple):
    """What is run, in order.

    `inbox_groups`, `outbox_groups` and `first_slots` are the most groups that ever wait for the
    body, for their backward, or between the first part's forward and backward. Group g has the
    index g modulo that. `turns_wait` says that gradients of losses are held until their turn.
    """

    loops: tuple[RepeatedSteps, ...]
    inbox_groups: int
    outbox_groups: int
    first_slots: int
    turns_wait: bool


def _on_last_stage(schedule: Schedule, ops: Ops) -> Bool[np.ndarray, " ticks"]:
    """Say in which ticks the last rank runs its last chunk."""
    return ops.valid[:, -1] & (ops.chunk[:, -1] == schedule.chunks - 1)


def _ticks(schedule: Schedule) -> list[Ticks]:
    """Split the ticks where the kind of work changes, and between the groups of the last stage."""
    ops = schedule.forward, schedule.backward
    loss, turn = (_on_last_stage(schedule, table) for table in ops)
    forward, backward = (table.valid.any(axis=1) for table in ops)
    groups = [
        np.where(there, table.microbatch[:, -1] // schedule.ranks, -1)
        for there, table in zip((loss, turn), ops, strict=True)
    ]
    # The group of the last stage is part of the key: with one chunk all steady ticks are alike, and
    # a group's events must stand between those of one group and the next.
    keys = np.stack([forward, loss, turn, backward, *groups], axis=1)
    changes = 1 + np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1))
    edges = [0, *changes.tolist(), len(keys)]
    return [
        Ticks(start, stop, *(bool(flag) for flag in keys[start, :4]))
        for start, stop in pairwise(edges)
    ]


def _group_ticks(schedule: Schedule, ops: Ops) -> list[Int[np.ndarray, " times"]]:
    """Return, per group, the ticks in which the first stage runs a microbatch of it."""
    ticks = np.flatnonzero(ops.valid[:, 0] & (ops.chunk[:, 0] == 0))
    groups = ops.microbatch[ticks, 0] // schedule.ranks
    return [ticks[groups == group] for group in range(schedule.microbatches // schedule.ranks)]


def _steps(schedule: Schedule) -> Iterator[Step]:
    """Yield the ticks, and each group's events as late and as early as they may stand."""
    entries = [int(ticks.min()) for ticks in _group_ticks(schedule, schedule.forward)]
    backward = [] if schedule.forward_only else _group_ticks(schedule, schedule.backward)
    exits = [int(ticks.max()) for ticks in backward]
    for ticks in _ticks(schedule):
        inside = range(ticks.start, ticks.stop)
        yield from (FirstForward(g) for g, tick in enumerate(entries) if tick in inside)
        yield ticks
        yield from (FirstBackward(g) for g, tick in enumerate(exits) if tick in inside)


def _likeness(step: Step) -> object:
    """Return what two steps share if one program can run both."""
    if isinstance(step, Ticks):
        return replace(step, start=0, stop=step.stop - step.start)
    return type(step)


def _longest_repeat(kinds: Sequence[object]) -> tuple[int, int, int]:
    """Return (start, width, times) of the repetition that covers most steps; times 1 if none."""
    # run: how many kinds up to i equal the one `width` before them. A run of n ends n // width + 1
    # copies of the period. All but one copy, width * (times - 1) steps, need no code of their own.
    best = (0, 1, 1)
    for width in range(1, min(MOST_STEPS_OF_A_PERIOD, len(kinds)) + 1):
        run = 0
        for i in range(width, len(kinds)):
            run = run + 1 if kinds[i] == kinds[i - width] else 0
            times = run // width + 1
            if width * (times - 1) > best[1] * (best[2] - 1):
                best = (i + 1 - width * times, width, times)
    return best


def _fold(steps: Sequence[Step]) -> Iterator[RepeatedSteps]:
    """Yield the steps in order, like neighbours folded into loops."""
    # Interleaved, P=2, V=2, M=8. f, l, t, b: ticks with a forward, a loss, a turn, a backward;
    # Fg and Bg: the first part's forward and backward of group g.
    #
    #     F0 f F1 fltb  fb F2 fltb B0  fb F3 fltb B1  fb fltb B2 b B3
    #                  '------------''------------'
    #                   one loop of 2 iterations: their steps differ in numbers alone
    #
    # For 4 times the microbatches the loop has more iterations, and the program is the same. What
    # is left on both sides is folded in turn.
    start, width, times = _longest_repeat([_likeness(step) for step in steps])
    if times == 1:
        yield from (((step,),) for step in steps)
        return
    end = start + width * times
    yield from _fold(steps[:start])
    yield tuple(tuple(steps[i : i + width]) for i in range(start, end, width))
    yield from _fold(steps[end:])


def _most_alive(starts: Sequence[int], ends: Sequence[int]) -> int:
    """Return how many of the lives overlap at most, both ends included."""
    return max(
        (sum(s <= now <= e for s, e in zip(starts, ends, strict=True)) for now in starts), default=0
    )


def segments(schedule: Schedule) -> Segments:
    """Return the program of a schedule."""
    steps = list(_steps(schedule))
    index = {step: i for i, step in enumerate(steps)}
    ticks = [(step, i) for step, i in index.items() if isinstance(step, Ticks)]

    def index_of(tick: int) -> int:
        return next(i for step, i in ticks if step.start <= tick < step.stop)

    # A group waits in the inbox from its first part to the last entry of one of its microbatches,
    # and in the outbox from the first microbatch that comes back to its first part's backward.
    forward = _group_ticks(schedule, schedule.forward)
    groups = range(len(forward))
    arrivals = [index[FirstForward(g)] for g in groups]
    inbox = _most_alive(arrivals, [index_of(int(t.max())) for t in forward])
    loops = tuple(_fold(steps))
    if schedule.forward_only:
        return Segments(loops, inbox, 0, 0, turns_wait=False)
    backward = _group_ticks(schedule, schedule.backward)
    returns = [index[FirstBackward(g)] for g in groups]
    return Segments(
        loops=loops,
        inbox_groups=inbox,
        outbox_groups=_most_alive([index_of(int(t.min())) for t in backward], returns),
        first_slots=_most_alive(arrivals, returns),
        turns_wait=_turns_wait(schedule),
    )


def _turns_wait(schedule: Schedule) -> bool:
    """Say whether the last stage's backward ever comes in a later tick than its forward."""
    forward, backward = ticks_of(schedule, schedule.forward), ticks_of(schedule, schedule.backward)
    return bool((forward[-1] != backward[-1]).any())


class Tables(NamedTuple):
    """What each rank runs, idle entries filled in so that nothing needs a mask but its `valid`.

    An idle forward writes to a slot that nobody reads again. An idle backward goes back through a
    forward of its rank whose residuals are still there: with cotangents of zero, finite residuals
    give gradients of zero. `num_slots` is the schedule's, and one more if some rank idles in a
    forward while all its slots are alive (GPipe, and 1F1B of P microbatches).
    """

    forward: Ops
    backward: Ops
    num_slots: int


def tables(schedule: Schedule) -> Tables:
    """Return the schedule's tables with idle entries filled in."""
    forward = Ops(*(table.copy() for table in schedule.forward))
    backward = Ops(*(table.copy() for table in schedule.backward))
    spare = 0
    for rank in range(schedule.ranks):
        spare = max(spare, _fill_rank(schedule, forward, backward, rank))
    return Tables(forward, backward, schedule.num_slots + spare)


def _fill_rank(schedule: Schedule, forward: Ops, backward: Ops, rank: int) -> int:
    """Fill in one rank's idle entries; return how many slots are needed beyond the schedule's."""
    if schedule.forward_only:
        return 0
    # 1F1B, P=2, M=4, rank 0 with 3 slots. Entries in brackets are filled in:
    #
    #     tick              0    1    2    3    4    5
    #     forward  F(0,m)   m=0  m=1  m=2  m=3
    #              slot     0    1    2    0   (1)         slot 1 is dead: B(0,1) was in tick 3
    #     backward B(0,m)             m=0  m=1  m=2  m=3
    #              slot    (0)  (0)   0    1    2    0     back through F(0,0), with cotangents of 0
    #
    # `alive` are slots whose backward is still to come. `holds` says which forward last wrote a
    # slot, alive or dead. A slot leaves `holds` when an idle forward writes it: what the rank was
    # sent may be NaN, and 0 * NaN would reach the gradients.
    last = np.flatnonzero(schedule.forward.valid.any(axis=1))[-1]
    holds: dict[int, tuple[int, int]] = {}
    alive: set[int] = set()
    spare = 0
    for tick in range(schedule.num_ticks):
        # Forward first, as in a tick: a slot whose backward runs in this tick is still alive.
        slot = int(forward.slot[tick, rank])
        if forward.valid[tick, rank]:
            alive.add(slot)
            holds[slot] = (int(forward.chunk[tick, rank]), int(forward.microbatch[tick, rank]))
        elif tick <= last:
            slot = _dead_slot(alive, holds, schedule.num_slots)
            spare = max(spare, slot + 1 - schedule.num_slots)
            holds.pop(slot, None)
            forward.slot[tick, rank] = slot
        if backward.valid[tick, rank]:
            alive.discard(int(backward.slot[tick, rank]))
        elif holds:
            slot = next(iter(holds))
            chunk, microbatch = holds[slot]
            backward.chunk[tick, rank], backward.microbatch[tick, rank] = chunk, microbatch
            backward.slot[tick, rank] = slot
    return spare


def _dead_slot(alive: set[int], holds: dict[int, tuple[int, int]], num_slots: int) -> int:
    """Return a slot whose residuals nobody needs, if possible one that never held any."""
    dead = [slot for slot in range(num_slots) if slot not in alive]
    # A slot in `holds` is worth leaving: an idle backward can go through its residuals.
    empty = [slot for slot in dead if slot not in holds]
    return next(iter(empty + dead), num_slots)


def as_rows(ops: Ops) -> Int32[np.ndarray, "ticks ranks 4"]:
    """Return a table as one array of integers, the columns as they stand in `Ops`."""
    return np.stack([table.astype(np.int32) for table in ops], axis=-1)
