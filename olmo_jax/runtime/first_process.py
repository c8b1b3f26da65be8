"""What the first process of a job decides or writes for all of them."""

import time
from collections.abc import Callable

import jax
from jax.errors import JaxRuntimeError

from olmo_jax.errors import UserError
from olmo_jax.runtime.connection import PREFIX, client, is_connected

UNTIL_IT_ENDS_S = 5.0
DONE, FAILED = "done", "failed"


def is_first() -> bool:
    """Say whether this process writes the run folder and speaks for the job."""
    return jax.process_index() == 0


def from_first(name: str, work: Callable[[], str], timeout_s: float) -> str:
    """Return what `work` returns in the first process, which alone does it; once for each `name`.

    It goes through the coordination service and touches no device.

    Raises: what `work` raises; in the other processes a UserError, also after `timeout_s`.
    """
    if not is_connected():
        return work()
    key = f"{PREFIX}/from_first/{name}"
    if not is_first():
        return _told(name, key, timeout_s)
    try:
        found = work()
    except BaseException:
        client().key_value_set(key, FAILED)
        raise
    client().key_value_set(key, DONE + found)
    return found


def _told(name: str, key: str, timeout_s: float) -> str:
    try:
        text = client().blocking_key_value_get(key, round(timeout_s * 1000))
    except JaxRuntimeError as error:
        raise UserError(
            f"process 0 did not come past '{name}' within {timeout_s:g} s "
            f"({str(error).partition(chr(10))[0]}); look into its log"
        ) from None
    if text == FAILED:
        # Its end ends this process too: what the user reads last is its message.
        time.sleep(UNTIL_IT_ENDS_S)
        raise UserError(f"process 0 failed in '{name}'; its own message says what to do")
    return text.removeprefix(DONE)
