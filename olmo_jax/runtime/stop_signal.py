"""Ctrl-C, SIGTERM and SIGHUP as a flag that the training loop looks at."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# nohup starts a command with SIGHUP ignored, a shell's `&` with SIGINT: they stay ignored.
MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
STOPPED_EXIT_CODE = "OLMO_JAX_STOPPED_EXIT_CODE"
# 128 + SIGTERM, as of any process that a signal has ended.
TERMINATED = 143

_received: list[int] = []


def heard() -> tuple[int, ...]:
    """Return the signals that stop a run: those that were not ignored when it was started."""
    return tuple(
        number
        for number in NUMBERS
        if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    )


def end_when_told() -> None:
    """Let SIGTERM and SIGHUP end this process until a StopSignal is open, also if it is process 1.

    Linux keeps from process 1, as in a container, what would end it by default: without a handler
    the signal is lost. Any other process keeps the default, which ends it in the midst of a call.
    """
    if os.getpid() == 1:
        for number in set(heard()) - {signal.SIGINT}:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    # At once, as the signal itself would: an orderly exit waits for the other processes.
    os._exit(128 + number)


class StopSignal:
    """While open, the first signal that is heard sets `requested`; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._receive) for number in heard()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        _received.append(number)
        # Not print: a handler may run in the middle of another write to the same stream.
        # After a hangup there is no terminal to write to.
        with suppress(OSError):
            os.write(2, b"\nstopping after the step that is running; Ctrl-C again aborts\n")


def exit_code() -> int:
    """Return the exit code of a run that went well: 0, or another one if it was asked to stop.

    Kubernetes takes a pod that ends with 0 for done for ever, also one that it has evicted itself:
    the JobSet sets STOPPED_EXIT_CODE, and starts anew.
    """
    return int(os.environ.get(STOPPED_EXIT_CODE, "0")) if _received else 0


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Put Python's handlers back afterwards: jax.distributed takes SIGTERM and only notes it.

    A run that is asked to end before its loop listens would then not end.
    """
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
