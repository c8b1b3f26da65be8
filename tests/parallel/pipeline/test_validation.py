"""The validator finds every kind of damage, and names the op, its tick and its rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_jax.parallel.pipeline import Ops, forward_only, interleaved, validate

TRAINING = interleaved(2, 2, 4)
ALONE = forward_only(2, 2, 4)


def copied(schedule):
    forward = Ops(*(table.copy() for table in schedule.forward))
    backward = Ops(*(table.copy() for table in schedule.backward))
    return replace(schedule, forward=forward, backward=backward)


def set_op(ops, tick, rank, entry):
    for table, value in zip(ops, entry, strict=True):
        table[tick, rank] = value


def entry_of(ops, tick, rank):
    return tuple(table[tick, rank] for table in ops)


def move(ops, rank, tick, to_tick, to_rank=None):
    entry = entry_of(ops, tick, rank)
    set_op(ops, tick, rank, (False, 0, 0, 0))
    set_op(ops, to_tick, rank if to_rank is None else to_rank, entry)


def swap(ops, rank, tick, other):
    entry, other_entry = entry_of(ops, tick, rank), entry_of(ops, other, rank)
    set_op(ops, tick, rank, other_entry)
    set_op(ops, other, rank, entry)


def table_edit(kind, name, tick, rank, value):
    return lambda s: getattr(getattr(s, kind), name).__setitem__((tick, rank), value)


def pad(schedule, ticks):
    """Return the schedule with idle ticks at its end."""
    longer = [
        Ops(*(np.pad(table, ((0, ticks), (0, 0))) for table in ops))
        for ops in (schedule.forward, schedule.backward)
    ]
    return replace(schedule, forward=longer[0], backward=longer[1])


IN_PLACE = {
    "an op left out": (
        TRAINING,
        lambda s: set_op(s.forward, 4, 0, (False, 0, 0, 0)),
        r"F\(stage 0, microbatch 2\) is missing: it runs in no tick on rank 0",
    ),
    "a backward left out": (
        TRAINING,
        lambda s: set_op(s.backward, 3, 1, (False, 0, 0, 0)),
        r"B\(stage 3, microbatch 0\) is missing: it runs in no tick on rank 1",
    ),
    "an op twice": (
        TRAINING,
        lambda s: set_op(s.forward, 9, 0, entry_of(s.forward, 4, 0)),
        r"F\(stage 0, microbatch 2\) in tick 9 on rank 0 runs a second time, but ran in tick 4",
    ),
    "a backward twice": (
        TRAINING,
        lambda s: set_op(s.backward, 0, 1, entry_of(s.backward, 3, 1)),
        r"B\(stage 3, microbatch 0\) in tick 3 on rank 1 runs a second time, but ran in tick 0",
    ),
    "an op on another rank": (
        TRAINING,
        lambda s: move(s.forward, 0, 0, 0, to_rank=1),
        r"F\(stage 1, microbatch 0\) in tick 1 on rank 1 runs a second time",
    ),
    "two forwards in the wrong order": (
        TRAINING,
        lambda s: swap(s.forward, 1, 1, 3),
        r"F\(stage 3, microbatch 0\) in tick 1 on rank 1 must come 1 tick after its input, "
        r"F\(stage 2, microbatch 0\) in tick 2 on rank 0",
    ),
    "a backward before that of the next stage": (
        TRAINING,
        lambda s: swap(s.backward, 1, 5, 3),
        r"B\(stage 1, microbatch 0\) in tick 3 on rank 1 must come 1 tick after its input, "
        r"B\(stage 2, microbatch 0\) in tick",
    ),
    "a slot with two owners": (
        TRAINING,
        table_edit("forward", "slot", 1, 0, 0),
        r"F\(stage 0, microbatch 1\) in tick 1 on rank 0 takes slot 0, which holds "
        r"F\(stage 0, microbatch 0\) in tick 0 on rank 0",
    ),
    "a backward from another slot": (
        TRAINING,
        table_edit("backward", "slot", 3, 1, 1),
        r"B\(stage 3, microbatch 0\) in tick 3 on rank 1 reads slot 1, which holds "
        r"F\(stage 1, microbatch 1\) in tick 2 on rank 1",
    ),
    "a backward from an empty slot": (
        TRAINING,
        table_edit("backward", "slot", 3, 1, 4),
        r"B\(stage 3, microbatch 0\) in tick 3 on rank 1 reads slot 4, which holds nothing",
    ),
    "a slot out of range": (
        TRAINING,
        table_edit("forward", "slot", 2, 0, 5),
        "F in tick 2 on rank 0 has slot 5, but must have 0 to 4",
    ),
    "a chunk out of range": (
        TRAINING,
        table_edit("forward", "chunk", 2, 0, 2),
        "F in tick 2 on rank 0 has chunk 2, but must have 0 to 1",
    ),
    "a microbatch out of range": (
        TRAINING,
        table_edit("backward", "microbatch", 3, 1, -1),
        "B in tick 3 on rank 1 has microbatch -1, but must have 0 to 3",
    ),
    "a forward left out where there is nothing else": (
        ALONE,
        lambda s: set_op(s.forward, 4, 0, (False, 0, 0, 0)),
        r"F\(stage 0, microbatch 2\) is missing: it runs in no tick on rank 0",
    ),
    "a backward among forwards alone": (
        ALONE,
        lambda s: set_op(s.backward, 8, 1, (True, 1, 3, 0)),
        r"B\(stage 3, microbatch 3\) in tick 8 on rank 1 stands in a schedule that has forwards",
    ),
    "an idle entry that could index": (
        TRAINING,
        table_edit("backward", "slot", 0, 0, 1),
        "B in tick 0 on rank 0 has slot 1, but must have 0, as it is idle",
    ),
}


def early_backward():
    """Return a pipeline of one stage whose first backward comes before its forward."""
    schedule = pad(interleaved(1, 1, 2), 1)
    for table in schedule.forward:
        table[:] = np.roll(table, 1, axis=0)
    return schedule


def lost_input():
    """Return a schedule in which the last stage waits a tick with the gradient it has."""
    schedule = pad(interleaved(2, 1, 2), 1)
    for table in schedule.backward:
        table[:, 0] = np.roll(table[:, 0], 1)
    return schedule


WHOLE = {
    "a backward before its forward": (
        early_backward,
        r"B\(stage 0, microbatch 0\) in tick 0 on rank 0 must come 0 or more ticks after "
        r"its input, F\(stage 0, microbatch 0\) in tick 1 on rank 0",
    ),
    "an input that is overwritten": (
        lost_input,
        r"B\(stage 0, microbatch 0\) in tick 3 on rank 0 must come 1 tick after its input, "
        r"B\(stage 1, microbatch 0\) in tick 1 on rank 1",
    ),
    "more slots than used": (
        lambda: replace(TRAINING, num_slots=6),
        "num_slots=6, but at most 5 are in use on any rank",
    ),
    "fewer slots than used": (
        lambda: replace(TRAINING, num_slots=4),
        "F in tick . on rank 0 has slot 4, but must have 0 to 3",
    ),
    "slots where nothing is saved": (
        lambda: replace(ALONE, num_slots=1),
        "num_slots=1, but forwards alone save nothing",
    ),
    "more microbatches than run": (
        lambda: replace(TRAINING, microbatches=5),
        r"F\(stage 0, microbatch 4\) is missing: it runs in no tick on rank 0",
    ),
    "no rank": (lambda: replace(TRAINING, ranks=0), "ranks, chunks, microbatches and ticks are "),
    "a short table": (
        lambda: replace(
            TRAINING, backward=TRAINING.backward._replace(slot=TRAINING.backward.slot[1:])
        ),
        r"B slot is int32\[11, 2\], but must be int32\[12, 2\]",
    ),
    "a table of another type": (
        lambda: replace(
            TRAINING,
            forward=TRAINING.forward._replace(chunk=TRAINING.forward.chunk.astype(np.int64)),
        ),
        r"F chunk is int64\[12, 2\], but must be int32\[12, 2\]",
    ),
}


@pytest.mark.parametrize("damage", IN_PLACE)
def test_damage_in_a_table_is_found(damage):
    schedule, harm, message = IN_PLACE[damage]
    harmed = copied(schedule)
    harm(harmed)
    with pytest.raises(ValueError, match=f"^{schedule.name} schedule: {message}"):
        validate(harmed)


@pytest.mark.parametrize("damage", WHOLE)
def test_damage_of_a_schedule_is_found(damage):
    make, message = WHOLE[damage]
    with pytest.raises(ValueError, match=f" schedule: .*{message}"):
        validate(make())


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_entry_of_a_table_can_change(data):
    """Whatever number is changed wherever it stands, the schedule is no longer one."""
    harmed = copied(data.draw(st.sampled_from([TRAINING, interleaved(3, 1, 3)])))
    ops = data.draw(st.sampled_from([harmed.forward, harmed.backward]))
    table = data.draw(st.sampled_from(list(ops)))
    index = tuple(data.draw(st.integers(0, size - 1)) for size in table.shape)
    if table.dtype == np.bool_:
        table[index] = ~table[index]
    else:
        table[index] += data.draw(st.integers(-6, 6).filter(bool))
    with pytest.raises(ValueError, match=" schedule: "):
        validate(harmed)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_no_op_can_move_to_another_tick(data):
    harmed = copied(pad(interleaved(2, 2, 4), 3))
    ops = data.draw(st.sampled_from([harmed.forward, harmed.backward]))
    tick, rank = data.draw(st.sampled_from(np.argwhere(ops.valid).tolist()))
    idle = np.flatnonzero(~ops.valid[:, rank]).tolist()
    move(ops, rank, tick, data.draw(st.sampled_from(idle)))
    with pytest.raises(ValueError, match=" schedule: "):
        validate(harmed)
