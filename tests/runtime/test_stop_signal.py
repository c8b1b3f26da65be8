"""Signals as a flag, and the exit code of a run that one has stopped."""

import os
import signal
import subprocess
import sys

import pytest

from olmo_jax.runtime import stop_signal
from olmo_jax.runtime.stop_signal import StopSignal, exit_code, keep_handlers


@pytest.fixture(autouse=True)
def none_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "_received", [])


def test_a_run_that_was_not_asked_to_stop_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLMO_JAX_STOPPED_EXIT_CODE", "143")
    with StopSignal() as asked:
        assert not asked.requested
    assert exit_code() == 0


@pytest.mark.parametrize(("given", "code"), [(None, 0), ("143", 143)])
def test_a_run_that_a_signal_has_stopped_exits_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, given: str | None, code: int
) -> None:
    if given is not None:
        monkeypatch.setenv("OLMO_JAX_STOPPED_EXIT_CODE", given)
    with StopSignal() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        # A second one says nothing new.
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.requested
    assert exit_code() == code


def test_process_1_ends_when_it_is_told_to_before_its_loop_listens() -> None:
    # Process 1 gets no signal whose action is the default one.
    code = """
import os, signal, sys
from olmo_jax import cli
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = os.getpid()
os.getpid = lambda: 1
import olmo_jax.config_file
def load(*_):
    assert "jax" not in sys.modules
    os.kill(own, signal.SIGTERM)
    sys.exit("the signal was lost")
olmo_jax.config_file.load = load
cli.main(["train", "c.yaml"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_handler_that_another_library_sets_is_taken_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with keep_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before
