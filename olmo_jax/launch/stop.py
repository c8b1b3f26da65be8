"""Ctrl-C and SIGTERM as a flag that the training loop looks at."""

import os
import signal
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)


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
        # Not print: a handler may run in the middle of another write to the same stream.
        os.write(2, b"\nstopping after the step that is running; Ctrl-C again aborts\n")
