"""Signals as a flag, and the exit code of a run that one has stopped."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_signal_asks_for_a_stop_and_is_given_back(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as asked:
        os.kill(os.getpid(), number)
        assert asked.requested
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_what_nohup_and_a_shell_ignore_stays_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with StopSignal() as asked:
        os.kill(os.getpid(), number)
        assert not asked.requested
        # A scheduler's signal is heard, whoever started the run.
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.requested


HANGUP = """
import sys, time
from pathlib import Path
from olmo_jax.runtime.stop_signal import StopSignal, exit_code
from olmo_jax.runtime.streams import Unfailing
output = Unfailing(sys.stdout)
with StopSignal() as stop:
    output.write("listening\\n"); output.flush()
    while not stop.requested:
        time.sleep(0.02)
    for _ in range(3):
        output.write("stopping\\n"); output.flush()
    Path(sys.argv[1]).write_text("the checkpoint")
sys.stdout.flush()
sys.exit(exit_code())
"""


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_run_whose_terminal_has_gone_saves_and_exits_with_0(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    # A login shell makes its terminal the one that sends it SIGHUP, as this does.
    code = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{HANGUP}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "saved")],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
    )
    os.close(theirs)
    assert b"listening" in os.read(ours, 100)
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").read_text() == "the checkpoint"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_process_1_ends_when_it_is_told_to_before_its_loop_listens(name: str) -> None:
    # Process 1 gets no signal whose action is the default one.
    code = (
        f"number = {int(signal.Signals[name])}"
        + """
import os, signal, sys
from olmo_jax import cli
if number == signal.SIGTERM:
    signal.signal(number, signal.SIG_IGN)
own = os.getpid()
os.getpid = lambda: 1
import olmo_jax.config_file
def load(*_):
    assert "jax" not in sys.modules
    os.kill(own, number)
    sys.exit("the signal was lost")
olmo_jax.config_file.load = load
cli.main(["train", "c.yaml"])
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.Signals[name], "")


def test_a_handler_that_another_library_sets_is_taken_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with keep_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before
