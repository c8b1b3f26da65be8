"""A schedule's segments are its ticks, each once and in order; what idles is told to do no harm."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_jax.parallel.pipeline import forward_only, gpipe, interleaved
from olmo_jax.parallel.pipeline.segments import (
    FirstBackward,
    FirstForward,
    Ticks,
    segments,
    tables,
)

GENERATORS = (interleaved, gpipe, forward_only)


@st.composite
def schedules(draw):
    ranks, chunks, groups = (draw(st.integers(1, most)) for most in (5, 3, 6))
    return draw(st.sampled_from(GENERATORS))(ranks, chunks, groups * ranks)


def steps_of(program):
    return [step for loop in program.loops for iteration in loop for step in iteration]


def what_runs(schedule, tick):
    """Return what some rank does in a tick, as `Ticks` says it."""
    forward, backward, last = schedule.forward, schedule.backward, schedule.chunks - 1
    return (
        forward.valid[tick].any(),
        forward.valid[tick, -1] and forward.chunk[tick, -1] == last,
        backward.valid[tick, -1] and backward.chunk[tick, -1] == last,
        backward.valid[tick].any(),
    )


@given(schedule=schedules())
@settings(max_examples=40, deadline=None)
def test_every_tick_runs_once_in_order_as_what_it_is(schedule):
    ticks = [step for step in steps_of(segments(schedule)) if isinstance(step, Ticks)]
    assert [t for step in ticks for t in range(step.start, step.stop)] == list(
        range(schedule.num_ticks)
    )
    for step in ticks:
        kind = (step.forward, step.loss, step.turn, step.backward)
        assert {what_runs(schedule, tick) for tick in range(step.start, step.stop)} == {kind}


@given(schedule=schedules())
@settings(max_examples=40, deadline=None)
def test_the_iterations_of_a_loop_run_the_same_program(schedule):
    for loop in segments(schedule).loops:
        shapes = {
            tuple(
                (step.stop - step.start, step.forward, step.loss, step.turn, step.backward)
                if isinstance(step, Ticks)
                else type(step)
                for step in iteration
            )
            for iteration in loop
        }
        assert len(shapes) == 1


@given(schedule=schedules())
@settings(max_examples=40, deadline=None)
def test_groups_meet_their_microbatches_in_inbox_and_outbox(schedule):
    """Inbox, outbox and residuals of the first part are indexed modulo their number of groups."""
    program, ranks = segments(schedule), schedule.ranks
    inbox, outbox, residuals, back = {}, {}, {}, set()
    for step in steps_of(program):
        if isinstance(step, FirstForward):
            inbox[step.group % program.inbox_groups] = step.group
            if not schedule.forward_only:
                assert residuals.setdefault(step.group % program.first_slots, step.group) == (
                    step.group
                )
        elif isinstance(step, FirstBackward):
            index = step.group % program.outbox_groups
            assert outbox.pop(index) == (step.group, ranks)
            assert residuals.pop(step.group % program.first_slots) == step.group
            back.add(step.group)
        else:
            for tick in range(step.start, step.stop):
                if schedule.forward.valid[tick, 0] and schedule.forward.chunk[tick, 0] == 0:
                    group = int(schedule.forward.microbatch[tick, 0]) // ranks
                    assert inbox[group % program.inbox_groups] == group
                if schedule.backward.valid[tick, 0] and schedule.backward.chunk[tick, 0] == 0:
                    group = int(schedule.backward.microbatch[tick, 0]) // ranks
                    held, count = outbox.get(group % program.outbox_groups, (group, 0))
                    assert held == group
                    outbox[group % program.outbox_groups] = group, count + 1
    num_groups = 0 if schedule.forward_only else schedule.microbatches // ranks
    assert back == set(range(num_groups))
    assert not outbox


@pytest.mark.parametrize("generate", GENERATORS)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_program_does_not_grow_with_the_microbatches(generate, chunks):
    def size(groups):
        return [len(loop[0]) for loop in segments(generate(4, chunks, 4 * groups)).loops]

    assert size(4) == size(5) == size(16)


def test_1f1b_holds_a_few_groups_whatever_the_microbatches_and_gpipe_all():
    for groups in (3, 4, 16):
        program = segments(interleaved(4, 2, 4 * groups))
        held = program.inbox_groups, program.outbox_groups, program.first_slots
        assert held == (1, 1, 3)
        assert not program.turns_wait
        assert segments(gpipe(4, 2, 4 * groups)).first_slots == groups
    assert segments(gpipe(4, 2, 8)).turns_wait


@given(schedule=schedules())
@settings(max_examples=40, deadline=None)
def test_an_idle_rank_writes_to_dead_slots_and_goes_back_through_real_ones(schedule):
    if schedule.forward_only:
        return
    filled = tables(schedule)
    for rank in range(schedule.ranks):
        holds, alive = {}, set()
        for tick in range(schedule.num_ticks):
            valid, chunk, microbatch, slot = (int(t[tick, rank]) for t in filled.forward)
            if valid:
                alive.add(slot)
                holds[slot] = chunk, microbatch
            elif schedule.forward.valid[tick].any():
                assert slot not in alive
                holds.pop(slot, None)
            valid, chunk, microbatch, slot = (int(t[tick, rank]) for t in filled.backward)
            if schedule.backward.valid[tick].any():
                assert holds[slot] == (chunk, microbatch)
            if valid:
                alive.remove(slot)


@given(schedule=schedules())
@settings(max_examples=40, deadline=None)
def test_what_is_valid_stays_as_scheduled(schedule):
    filled = tables(schedule)
    pairs = (schedule.forward, filled.forward), (schedule.backward, filled.backward)
    for given_ops, ops in pairs:
        np.testing.assert_array_equal(ops.valid, given_ops.valid)
        for table, scheduled in zip(ops[1:], given_ops[1:], strict=True):
            np.testing.assert_array_equal(table[ops.valid], scheduled[ops.valid])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_slots_are_the_high_water_mark_once_there_are_two_groups(chunks):
    for ranks in (2, 4):
        for groups in (2, 3, 8):
            schedule = interleaved(ranks, chunks, groups * ranks)
            assert tables(schedule).num_slots == schedule.num_slots
        # With one group rank 0 idles in a forward while it holds all that it ever will.
        schedule = interleaved(ranks, chunks, ranks)
        assert tables(schedule).num_slots == schedule.num_slots + 1
