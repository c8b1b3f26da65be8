"""Whether a command computes on GPUs or on CPU devices: what is asked for and what is there."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from olmo_jax.config.messages import listing
from olmo_jax.config.records import Platform
from olmo_jax.errors import UserError

PLATFORM = "OLMO_JAX_PLATFORM"
JAX_PLATFORMS = "JAX_PLATFORMS"

# The driver's own listing: one folder a card. In a container without a card it is absent.
GPUS = Path("/proc/driver/nvidia/gpus")
# The driver of Windows, in its subsystem for Linux, lists none.
WINDOWS_DRIVER = Path("/dev/dxg")

# Slurm sets these on the nodes of a job with GPUs: lists of cards, and numbers of them.
SLURM_JOB = "SLURM_JOB_ID"
SLURM_CARDS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
SLURM_COUNTS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK")
POD = "KUBERNETES_SERVICE_HOST"
# The device plugin names the cards of a pod that asked for some. An image may have "all".
POD_GPUS = "NVIDIA_VISIBLE_DEVICES"
CARDS = ("GPU-", "MIG-")

# Left to jax where they are installed.
OTHER_PLUGINS = {"rocm": "jax_rocm7_plugin", "tpu": "libtpu"}


class Request(NamedTuple):
    """Who asks for which platform, as `mesh.platform=gpu`."""

    platform: Literal["gpu", "cpu"]
    source: str


def runs_on_gpu(asked: Platform | None = None) -> bool:
    """Say whether jax is to use GPUs: as asked, else as JAX_PLATFORMS says, else if it can.

    `asked` is mesh.platform; None is for a command that takes what is there.

    Raises: UserError if GPUs are asked for and CUDA cannot be used, if two ask for different
    platforms, or if JAX_PLATFORMS names one that jax does not have.
    """
    names = listed()
    own = Request("cpu" if names[0] == "cpu" else "gpu", given_platforms()) if names else None
    request = None if asked is None else _request(asked)
    if request and own and request.platform != own.platform:
        raise UserError(
            f"{request.source} asks for {request.platform.upper()} devices, and {own.source} for "
            f"others; unset {JAX_PLATFORMS}, or write mesh.platform={own.platform}"
        )
    request = request or own
    if request is None:
        return not list(missing_cuda())
    if request.platform == "gpu" and (not names or names[0] == "cuda"):
        _require_cuda(request)
    return request.platform == "gpu"


def _request(asked: Platform) -> Request | None:
    """Return what the config asks for, else the launcher, else the scheduler of this node."""
    if asked != "auto":
        return Request(asked, f"mesh.platform={asked}")
    given = os.environ.get(PLATFORM, "auto")
    if given not in ("auto", "gpu", "cpu"):
        raise UserError(f"{PLATFORM}={given} is none of auto, gpu and cpu; write one of them")
    if given != "auto":
        return Request(given, f"{PLATFORM}={given}")
    if (source := gpu_job()) is not None:
        return Request("gpu", f"{source} (a job with GPUs)")
    return None


def gpu_job() -> str | None:
    """Return the variable that says that Slurm or Kubernetes gave this job GPUs, if one does."""
    nothing = {**dict.fromkeys(SLURM_CARDS, ("",)), **dict.fromkeys(SLURM_COUNTS, ("", "0"))}
    if SLURM_JOB in os.environ:
        for name, words in nothing.items():
            if (given := os.environ.get(name, "")) not in words:
                return f"{name}={given}"
    if POD in os.environ and (given := os.environ.get(POD_GPUS, "")).startswith(CARDS):
        return f"{POD_GPUS}={given}"
    return None


def given_platforms() -> str:
    """Return JAX_PLATFORMS as a message shows it."""
    return f"{JAX_PLATFORMS}={os.environ.get(JAX_PLATFORMS, '')}"


def listed() -> list[str]:
    """Return the platforms of JAX_PLATFORMS, the one that is used first; none if it says nothing.

    Raises: UserError if one is not known.
    """
    words = os.environ.get(JAX_PLATFORMS, "").split(",")
    names = [{"gpu": "cuda"}.get(word.strip(), word.strip()) for word in words if word.strip()]
    known = ["cpu", "cuda"]
    known += [name for name, module in OTHER_PLUGINS.items() if _has_module(module)]
    for name in names:
        if name not in known:
            raise UserError(
                f"{given_platforms()}: jax has no platform {name!r} here; it has "
                f"{listing(known, 'and')}; write one of them, or unset {JAX_PLATFORMS}"
            )
    return names


def _require_cuda(request: Request) -> None:
    if missing := list(missing_cuda()):
        raise UserError(
            f"{request.source} asks for GPUs, and CUDA cannot be used: {'; '.join(missing)}; mend "
            "that, or take CPU devices: "
            + (
                f"unset {JAX_PLATFORMS}"
                if request.source.startswith(JAX_PLATFORMS)
                else "write mesh.platform=cpu"
            )
        )


def missing_cuda() -> Iterator[str]:
    """Yield what keeps jax from CUDA on this machine."""
    if not has_gpu():
        yield f"no NVIDIA GPU is here ({GPUS} lists none: no driver, or a container without GPUs)"
    elif (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and num_visible_gpus() == 0:
        yield f"CUDA_VISIBLE_DEVICES={shown} hides the GPUs"
    if not has_gpu_plugin():
        yield (
            f"jax has no CUDA plugin in {sys.executable} (pip install 'olmo_jax[cuda13]', "
            "Python >= 3.12; `make install-gpu` does so)"
        )


def has_gpu() -> bool:
    """Say whether the driver lists a GPU."""
    return any(GPUS.glob("*")) or WINDOWS_DRIVER.exists()


def has_gpu_plugin() -> bool:
    """Say whether jax can load CUDA."""
    return any(_has_module(f"jax_cuda{cuda}_plugin") for cuda in (12, 13))


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def num_visible_gpus() -> int:
    """Return how many GPUs CUDA will show to this process: its list ends at what is no card."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return max(len(list(GPUS.glob("*"))), int(WINDOWS_DRIVER.exists()))
    count = 0
    for name in (word.strip() for word in names.split(",")):
        if not name or name.startswith("-"):
            break
        count += 1
    return count
