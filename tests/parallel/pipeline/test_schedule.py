"""Schedules do what a pipeline must do, at the reference's own numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_jax.errors import UserError
from olmo_jax.parallel.pipeline import (
    SCHEDULES,
    Schedule,
    bubble,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_live,
    stages_of,
    timeline,
    validate,
)


@st.composite
def requests(draw) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 6))
    chunks = 1 if name == "1f1b" else draw(st.integers(1, 4))
    return name, ranks, chunks, draw(st.integers(1, 4)) * ranks


def generate(wanted):
    name, *counts = wanted
    return SCHEDULES[name](*counts)


def slots_of_time(schedule, rank):
    """Return what a rank does in each unit of time, as the reference writes it: 1F15, 9B3, 9B_3."""
    times = timeline(schedule)
    row = ["."] * times.length
    for stage in stages_of(schedule.ranks, schedule.chunks)[rank]:
        for microbatch in range(schedule.microbatches):
            start = times.backward[stage, microbatch]
            row[times.forward[stage, microbatch]] = f"{stage}F{microbatch}"
            row[start : start + 2] = f"{stage}B{microbatch}", f"{stage}B_{microbatch}"
    return row


def valid_ops(ops, tick, stages):
    """Yield (rank, stage, microbatch, slot) of each op of a tick."""
    for rank in np.flatnonzero(ops.valid[tick]).tolist():
        chunk, microbatch, slot = (int(table[tick, rank]) for table in ops[1:])
        yield rank, int(stages[rank, chunk]), microbatch, slot


def run_in_ticks(s: Schedule) -> tuple[list[tuple[int, int]], int]:
    """Run the tables as one program on all ranks would; return the backwards, and losses held.

    A value is named by what made it. Each rank has one buffer for what arrives from either side,
    sends in every tick, dead values too, and saves residuals in its slots.
    """
    stages, last = stages_of(s.ranks, s.chunks), s.num_stages - 1
    arrived, returned = [None] * s.ranks, [None] * s.ranks
    slots, losses = {}, set()
    done, most_losses = [], 0
    for tick in range(s.num_ticks):
        sent, sent_back = [None] * s.ranks, [None] * s.ranks
        for rank, stage, microbatch, slot in valid_ops(s.forward, tick, stages):
            assert stage == 0 or arrived[rank] == (stage - 1, microbatch)
            sent[rank] = slots[rank, slot] = (stage, microbatch)
            if stage == last:
                losses.add(microbatch)
        for rank, stage, microbatch, slot in valid_ops(s.backward, tick, stages):
            assert stage == last or returned[rank] == (stage + 1, microbatch)
            assert slots.pop((rank, slot)) == (stage, microbatch)
            sent_back[rank] = (stage, microbatch)
            done.append((stage, microbatch))
            if stage == last:
                losses.remove(microbatch)
        arrived, returned = sent[-1:] + sent[:-1], sent_back[1:] + sent_back[:1]
        most_losses = max(most_losses, len(losses))
    return done, most_losses


@given(wanted=requests())
@settings(max_examples=40, deadline=None)
def test_every_schedule_is_valid(wanted):
    schedule = generate(wanted)
    assert validate(schedule) is schedule
    assert schedule.num_slots == peak_live(schedule).max()


@given(wanted=requests())
@settings(max_examples=40, deadline=None)
def test_every_schedule_runs_with_one_receive_buffer_a_side(wanted):
    schedule = generate(wanted)
    done, losses = run_in_ticks(schedule)
    assert sorted(done) == list(np.ndindex(schedule.num_stages, schedule.microbatches))
    # 1F1B uses the gradient of a loss in the tick that makes it, GPipe after all forwards.
    assert losses == (schedule.microbatches if schedule.name == "gpipe" else 0)


@given(ranks=st.integers(1, 6), chunks=st.integers(1, 4), groups=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_schedules_take_the_time_of_their_formula(ranks, chunks, groups):
    microbatches = groups * ranks
    for generate in (interleaved, gpipe):
        schedule = generate(ranks, chunks, microbatches)
        work = chunks * microbatches
        assert timeline(schedule).length == 3 * (work + ranks - 1)
        assert bubble(schedule) == Fraction(ranks - 1, work + ranks - 1)
        backward_after = work + ranks - 1 if generate is gpipe else ranks * chunks - 1
        assert schedule.num_ticks == work + ranks - 1 + backward_after


@given(ranks=st.integers(1, 6), chunks=st.integers(1, 4), groups=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_interleaved_holds_one_activation_per_tick_of_the_round_trip(ranks, chunks, groups):
    peaks = peak_live(interleaved(ranks, chunks, groups * ranks))
    round_trip = (chunks - 1) * ranks + 2 * (ranks - 1 - np.arange(ranks)) + 1
    assert peaks.tolist() == np.minimum(round_trip, chunks * groups * ranks).tolist()


@pytest.mark.parametrize(("ranks", "peaks"), [(2, [5, 3]), (4, [11, 9, 7, 5])])
def test_interleaved_peaks_of_the_reference(ranks, peaks):
    assert peak_live(interleaved(ranks, 2, 8)).tolist() == peaks


def test_interleaved_peaks_fall_by_2_a_rank():
    assert peak_live(interleaved(8, 2, 64)).tolist() == list(range(23, 8, -2))


def test_1f1b_is_interleaved_with_one_chunk_and_gpipe_holds_every_microbatch():
    plain, one = one_f_one_b(4, 1, 8), interleaved(4, 1, 8)
    assert np.array_equal(plain.forward, one.forward)
    assert np.array_equal(plain.backward, one.backward)
    assert peak_live(plain).tolist() == [7, 5, 3, 1]
    assert peak_live(gpipe(4, 1, 8)).tolist() == [8] * 4


def test_the_bubble_of_the_report():
    idle = bubble(interleaved(4, 2, 8))
    assert (idle, f"{100 * float(idle):.1f}") == (Fraction(3, 19), "15.8")


def test_interleaved_slots_42_to_45_of_rank_1_of_8():
    row = slots_of_time(interleaved(8, 2, 64), rank=1)
    assert row[42:46] == ["1F15", "9B3", "9B_3", "9F8"]


def test_steady_ticks_alternate_the_chunks_in_groups_of_ranks():
    schedule = interleaved(2, 2, 4)
    chunks = schedule.forward.chunk[schedule.forward.valid[:, 0], 0]
    assert chunks.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


@given(ranks=st.integers(1, 6), chunks=st.integers(1, 4), groups=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_forwards_alone_save_nothing_and_wait_only_to_fill_the_pipeline(ranks, chunks, groups):
    work = chunks * groups * ranks
    schedule = validate(forward_only(ranks, chunks, groups * ranks))
    assert run_in_ticks(schedule) == ([], groups * ranks)
    assert timeline(schedule).length == schedule.num_ticks == work + ranks - 1
    assert bubble(schedule) == Fraction(ranks - 1, work + ranks - 1)
    assert (schedule.num_slots, peak_live(schedule).max()) == (0, 0)


def test_forwards_alone_run_in_the_ticks_of_training():
    alone, training = forward_only(4, 2, 8), interleaved(4, 2, 8)
    num_ticks = alone.num_ticks
    for table, other in zip(alone.forward[:3], training.forward[:3], strict=True):
        assert np.array_equal(table, other[:num_ticks])


def test_stages_go_round_the_ranks():
    assert stages_of(4, 2).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("generate", [interleaved, gpipe])
@pytest.mark.parametrize(("microbatches", "choices"), [(6, "4 or 8"), (3, "4"), (9, "8 or 12")])
def test_microbatches_that_are_no_multiple_of_ranks_name_their_neighbours(
    generate, microbatches, choices
):
    with pytest.raises(UserError, match=rf"^microbatches={microbatches} is .* use .*={choices}$"):
        generate(4, 2, microbatches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interleaved(0, 1, 4), "ranks=0, but a pipeline needs 1 or more; use ranks=1"),
        (lambda: gpipe(2, 0, 4), "chunks=0, but .* use chunks=1"),
        (lambda: interleaved(2, 2, 0), "microbatches=0, but .* use microbatches=1"),
        (lambda: one_f_one_b(2, 2, 4), "chunks=2, but 1f1b runs 1 chunk a rank; use chunks=1"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
