"""Python's garbage collector runs when all ranks run it."""

import gc

import pytest

from olmo_jax.runtime import garbage
from olmo_jax.runtime.garbage import Garbage


def test_cycles_are_collected_at_the_same_steps_and_at_no_other_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected = []
    with Garbage(every=3) as collector:
        assert not gc.isenabled()
        monkeypatch.setattr(garbage.gc, "collect", lambda: collected.append(step))
        for step in range(1, 8):
            collector.after(step)
    assert gc.isenabled()
    assert collected == [3, 6]


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with Garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
