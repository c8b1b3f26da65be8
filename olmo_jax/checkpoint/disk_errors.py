"""What the disk or Orbax refuses, as one message; both raise what they like."""

import errno
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from olmo_jax.errors import UserError

_ADVICE = {
    errno.ENOSPC: "make room there, or name another run_dir",
    errno.EDQUOT: "make room within the quota, or name another run_dir",
    errno.EFBIG: "raise the limit of a file's size, or name another run_dir",
    errno.EROFS: "name a run_dir that can be written",
    errno.EACCES: "give this user the right to it, or name another run_dir",
    errno.EPERM: "give this user the right to it, or name another run_dir",
}
"""What a disk refuses. TensorStore gives the system's words instead of its numbers."""

Hook = Callable[[Any], object]

_LATE = ("Event loop is closed",)
_LOG = logging.getLogger("absl")


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_late(told: Any) -> bool:
    if inspect.iscoroutine(told.object):
        return "orbax" in told.object.cr_code.co_filename
    return isinstance(told.exc_value, RuntimeError) and told.exc_value.args == _LATE


def _drop_late_answers(plain: Hook, told: Any) -> None:
    if not _is_late(told):
        plain(told)


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Let Orbax print no traceback of what it raises too.

    It logs one in each of its threads, and Python prints one for each answer of TensorStore that
    nobody waits for any more; these may come late, so an error leaves all of this in place.
    """
    plain = sys.unraisablehook
    sys.unraisablehook = partial(_drop_late_answers, plain)
    _LOG.addFilter(_is_no_traceback)
    yield
    _LOG.removeFilter(_is_no_traceback)
    sys.unraisablehook = plain


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refusal_of(error: BaseException) -> tuple[str, str] | None:
    """Return the system's words for what it refused and what to do, None for any other error."""
    for one in _chain(error):
        for code, advice in _ADVICE.items():
            words = os.strerror(code)
            if (isinstance(one, OSError) and one.errno == code) or words in str(one):
                return words, advice
    return None


def short(error: BaseException) -> str:
    """Return an error's first line."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


@contextmanager
def of_writing(folder: object, kept: str) -> Iterator[None]:
    """Turn what stops a write into a message; `kept` says what is there still.

    Raises: UserError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Orbax and TensorStore raise all kinds
        words, advice = refusal_of(error) or (short(error), "mend that, or name another run_dir")
        raise UserError(
            f"{folder} could not be written: {words}; a checkpoint counts once all of it is "
            f"written, and {kept}; {advice}"
        ) from error
