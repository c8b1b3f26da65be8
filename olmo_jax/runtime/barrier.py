"""A barrier between processes with a name and a limit."""

import re

from jax.errors import JaxRuntimeError

from olmo_jax.config.messages import listing
from olmo_jax.errors import UserError
from olmo_jax.runtime.connection import client, is_connected


def barrier(name: str, timeout_s: float) -> None:
    """Wait until every process has come to the barrier `name`; alone, return at once.

    It goes through process 0's coordination service, touches no device, and may be used again.

    Raises: UserError that names the ranks which did not come within `timeout_s`.
    """
    if not is_connected():
        return
    try:
        client().wait_at_barrier(name, round(timeout_s * 1000))
    except JaxRuntimeError as error:
        raise UserError(_message(name, timeout_s, str(error))) from None


def _message(name: str, timeout_s: float, error: str) -> str:
    if "DEADLINE_EXCEEDED" not in error:
        reason = error.strip().partition("\n")[0]
        return f"barrier '{name}' failed: {reason}; look into the logs of the other ranks"
    absent = missing_ranks(error)
    who = f"rank {listing(absent, 'and')}" if absent else "not every rank"
    verb = "did not come" if absent else "came"
    return (
        f"barrier '{name}': {who} {verb} within {timeout_s:g} s; every rank must; look into "
        f"{'its log' if len(absent) == 1 else 'their logs'} for what it does instead"
    )


def missing_ranks(error: str) -> list[int]:
    """Return the ranks that the coordination service lists as absent, as many as it names."""
    _, found, tail = error.partition("timed out task names:")
    block = re.match(r"(?:\s*\d+\s*?(?:\n|$))+", tail) if found else None
    return sorted(int(rank) for rank in block[0].split()) if block else []
