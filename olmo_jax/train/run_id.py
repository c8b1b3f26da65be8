"""What tells a run's checkpoints from those of another: an id that lies in its folder."""

import secrets
from pathlib import Path

from olmo_jax.checkpoint import RUN_ID, run_id_of, steps
from olmo_jax.errors import UserError
from olmo_jax.train.run_folder import replace


def identify(run_dir: Path) -> str:
    """Return the id of the run in a folder; one that has nothing yet gets one.

    A run of an old version, whose checkpoints have none, stays without: "".

    Raises: UserError if the folder cannot be written.
    """
    path, known = run_dir / RUN_ID, run_id_of(run_dir)
    if path.exists() or (known is None and steps(run_dir)):
        return known or ""
    made = known or secrets.token_hex(8)
    try:
        replace(path, f"{made}\n".encode())
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}); name a folder that can be"
        ) from None
    return made
