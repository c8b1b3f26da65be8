"""Learning rates: the reference's own values, and what must hold for any schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_jax.config.records import OptimConfig, ScheduleConfig, StageConfig
from olmo_jax.optim.schedule import learning_rate


def rate(count, total=10_000, lr=10.0, **schedule):
    optim = OptimConfig(lr=lr, schedule=ScheduleConfig(**schedule))
    return learning_rate(optim, step=count, tokens=0, total_steps=total, total_tokens=0)


WARM = {"warmup": 3000, "warmup_start": 0.4, "final": 0.2}
KINDS = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_rises_from_4_to_10_over_3000_steps(kind):
    assert [rate(count, kind=kind, **WARM) for count in (0, 1000, 3000)] == [4.0, 6.0, 10.0]


def test_constant_stays_at_the_peak():
    assert rate(3001, kind="constant", **WARM) == rate(99_999, kind="constant", **WARM) == 10.0


def test_linear_reaches_a_fifth_at_the_horizon_and_stays_there():
    assert rate(5000, kind="linear", **WARM) == 10.0 - 8.0 * 2 / 7
    assert rate(10_000, kind="linear", **WARM) == rate(12_345, kind="linear", **WARM) == 2.0


def test_cosine_is_the_half_wave_after_the_warmup():
    expected = 2.0 + 8.0 * (1 + math.cos(math.pi * 2 / 7)) / 2
    assert rate(5000, kind="cosine", **WARM) == pytest.approx(expected, rel=1e-15)
    assert rate(10_000, kind="cosine", **WARM) == rate(12_345, kind="cosine", **WARM) == 2.0


@pytest.mark.parametrize("count", [3001, 5000, 10_000, 40_000])
def test_inverse_sqrt_falls_without_end(count):
    assert rate(count, kind="inverse_sqrt", **WARM) == 2.0 + 8.0 * math.sqrt(3000 / count)


def test_wsd_is_flat_and_then_falls_to_its_end():
    wsd = {"kind": "wsd", "decay": 2000, **WARM}
    counts = (3001, 8000, 9000, 10_000, 11_000)
    assert [rate(count, **wsd) for count in counts] == [10.0, 10.0, 6.0, 2.0, 2.0]


def test_wsd_decays_over_the_last_tenth_unless_told():
    wsd = {"kind": "wsd", "warmup": 0, "final": 0.0}
    assert [rate(count, **wsd) for count in (9000, 9500, 10_000)] == [10.0, 5.0, 0.0]
    assert rate(9500, decay_fraction=0.2, **wsd) == 2.5


def test_a_fraction_of_the_horizon_is_the_same_as_its_count():
    by_fraction = {**WARM, "warmup": None, "warmup_fraction": 0.3}
    for count in (0, 1000, 3000, 5000):
        assert rate(count, kind="linear", **by_fraction) == rate(count, kind="linear", **WARM)


def test_horizon_is_where_the_decay_ends_whatever_the_number_of_steps():
    assert rate(10_000, total=50_000, kind="linear", horizon=10_000, **WARM) == 2.0


def test_token_schedules_count_tokens():
    optim = OptimConfig(lr=10.0, schedule=ScheduleConfig(kind="linear", unit="tokens", **WARM))
    for step in (1, 7):
        got = learning_rate(optim, step=step, tokens=5000, total_steps=10, total_tokens=10_000)
        assert got == 10.0 - 8.0 * 2 / 7


def stages(*args):
    return {"kind": "composable", "stages": [StageConfig(**stage) for stage in args]}


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_composable_stages_equal_the_schedule_they_spell_out(shape):
    spelled = stages(
        {"duration": 3000, "start": 0.4, "end": 1.0}, {"duration": 7000, "shape": shape, "end": 0.2}
    )
    for count in range(0, 12_000, 250):
        assert rate(count, **spelled) == rate(count, kind=shape, **WARM)


def test_composable_starts_where_the_last_stage_ended_and_holds_the_last_value():
    spelled = stages(
        {"duration": 100, "end": 1.0},
        {"duration": 100, "end": 0.5},
        {"duration": 100, "start": 0.2, "end": 0.2},
        {"duration": 100, "end": 0.0},
    )
    counts = (0, 50, 100, 150, 200, 201, 300, 350, 400, 4000)
    expected = [0.0, 5.0, 10.0, 7.5, 5.0, 2.0, 2.0, 1.0, 0.0, 0.0]
    assert [rate(count, **spelled) for count in counts] == expected


def test_composable_takes_no_notice_of_the_horizon():
    spelled = stages({"duration": 100, "end": 1.0}, {"duration": 100, "end": 0.1})
    assert rate(150, total=10, **spelled) == rate(150, total=10_000, **spelled)


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 60),
    decay=st.integers(0, 40),
    final=st.floats(0, 1),
    count=st.integers(1, 130),
)
def test_rates_stay_between_their_ends(kind, warmup, decay, final, count):
    got = rate(count, 100, 3e-4, kind=kind, warmup=warmup, decay=decay, final=final)
    low = 0.0 if count < warmup else final * 3e-4
    assert low * (1 - 1e-12) <= got <= 3e-4 * (1 + 1e-12)
