"""The standard streams of a command: open, able to print every character, no cause of failure."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def open_standard_streams() -> None:
    r"""Open those that a shell has closed (`>&-`), and let the outputs print every character.

    What their encoding lacks, and the bytes of a name that are no UTF-8, are printed as `\xe9`.
    """
    # A file that is opened later would become the standard stream of this process.
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 it is open as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(path: Path) -> str:
    """Return a path as text for a file or a picture, also if its bytes are no UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()


def complain(text: str) -> None:
    """Print a message to standard error, if anybody still reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer would fail once more when the interpreter ends.
        discard(sys.stderr)


def discard(stream: Any) -> None:
    """Let what is still to be printed go nowhere: the reader, such as `head`, has gone."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Unfailing:
    """An output that falls silent when it cannot be written: no reader, no terminal, no room."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or nothing from now on."""
        try:
            return self._stream.write(text)
        except OSError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush, or write nothing from now on."""
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
