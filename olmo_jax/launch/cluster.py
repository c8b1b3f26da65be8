"""What the processes of a job on a cluster are told, whichever scheduler starts them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from olmo_jax.config import Config
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES
from olmo_jax.runtime.environment import DETERMINISTIC_FLAG
from olmo_jax.runtime.platform import PLATFORM

GPU_FLAGS = {
    # On by default in the versions that are supported; an image may have turned it off.
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""XLA's flags on GPUs, each known to the oldest and the newest jaxlib: XLA aborts on another."""

GPU_VARIABLES = {
    # Of a GPU's memory; jax takes 0.75 by default, and the rest would lie idle.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
}

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(config: Config, own: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of every process; `own` are the user's NAME=VALUE, which win.

    Raises: UserError if one of `own` is no NAME=VALUE.
    """
    flags = [f"{name}={value}" for name, value in GPU_FLAGS.items()]
    if config.train.deterministic:
        flags.append(DETERMINISTIC_FLAG)
    return {
        # A process that finds no GPU fails, and does not train on a CPU.
        PLATFORM: "gpu",
        # All processes read it, process 0 writes it: it must lie where all of them look.
        "JAX_COMPILATION_CACHE_DIR": f"{config.run_dir.rstrip('/')}/compiled",
        **GPU_VARIABLES,
        "XLA_FLAGS": " ".join(flags),
        **dict(_pair(text) for text in own),
    }


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and VARIABLE.fullmatch(name)):
        raise UserError(
            f"--env {text}: it takes NAME=VALUE, and a name has letters, digits and _; write "
            "--env NCCL_DEBUG=INFO, for example"
        )
    return name, value


def check_devices(config: Config, given: Mapping[str, int]) -> None:
    """Compare the mesh with the devices of the job, `given` as options whose product they are.

    Raises: UserError.
    """
    if config.mesh.platform == "cpu":
        raise UserError(
            "mesh.platform=cpu, but a job on a cluster asks for GPUs, which would lie idle; write "
            "mesh.platform=auto, or train on CPU devices with olmo-jax launch local"
        )
    sizes = {axis: size for axis, size in config.mesh if size != 1}
    wanted, there = _product(sizes.values()), _product(given.values())
    if -1 in sizes.values():
        wanted = abs(wanted)
        fits = there % wanted == 0
    else:
        fits = wanted == there
    if not fits:
        options = " x ".join(f"{name} {value}" for name, value in given.items())
        mesh = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items()) or "the mesh"
        raise UserError(
            f"{options} = {there} devices, but {mesh} is one of {wanted}; a job has as many as its "
            f"mesh; ask for other nodes, or write other mesh.{{{','.join(AXES)}}}"
        )


def _product(numbers: Any) -> int:
    found = 1
    for number in numbers:
        found *= number
    return found


def check_word(option: str, value: str | None, pattern: str, example: str) -> None:
    """Check an option that a scheduler reads without a shell's quotes.

    Raises: UserError.
    """
    if value is not None and not re.fullmatch(pattern, value):
        raise UserError(
            f"{option} {value!r} has characters that a scheduler does not take; it must match "
            f"{pattern}; write {option} {example}, for example"
        )
