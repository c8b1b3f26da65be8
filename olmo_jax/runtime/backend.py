"""The devices that jax has once it has started, and a message where they are not as chosen."""

import jax

from olmo_jax.errors import UserError
from olmo_jax.runtime.platform import runs_on_gpu


def num_devices() -> int:
    """Return the number of the job's devices.

    jax falls back to the CPU when CUDA does not start, as with a driver that is too old.

    Raises: UserError if GPUs were chosen and jax has none.
    """
    on_gpu = runs_on_gpu()
    try:
        platform, count = jax.default_backend(), jax.device_count()
    except RuntimeError as error:
        raise UserError(_message(str(error).partition("\n")[0])) from None
    if on_gpu and platform == "cpu":
        raise UserError(_message("its own lines above say why"))
    return count


def _message(reason: str) -> str:
    return (
        f"jax cannot start CUDA, although there are a GPU and a plugin: {reason}; look at the "
        "driver (nvidia-smi), or write mesh.platform=cpu to take CPU devices"
    )
