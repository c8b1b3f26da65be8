"""Ctrl-C and SIGTERM as a flag that the training loop looks at."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
STOPPED_EXIT_CODE = "OLMO_JAX_STOPPED_EXIT_CODE"
# 128 + SIGTERM, as of any process that a signal has ended.
TERMINATED = 143

_received: list[int] = []


def end_on_sigterm() -> None:
    """Let SIGTERM end this process, until a StopSignal is open, also if it is process 1.

    Linux keeps from process 1, as in a container, what would end it by default: without a handler
    the signal is lost. Any other process keeps the default, which ends it in the midst of a call.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(_: int, __: FrameType | None) -> None:
    # At once, as the signal itself would: an orderly exit waits for the other processes.
    os._exit(TERMINATED)


class StopSignal:
    """While open, the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._receive) for number in NUMBERS}
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
