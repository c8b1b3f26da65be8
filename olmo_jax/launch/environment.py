"""What jax reads from the environment, set before its import; nothing else touches os.environ."""

import importlib.util
import os
import sys
from pathlib import Path

# XLA:CPU aborts the process when a device reaches a collective this much later than the first one.
# With more emulated devices than cores that happens at the 40 s which are the default.
COLLECTIVE_TIMEOUT_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


def prepare(num_cpu_devices: int, *, deterministic: bool = False) -> tuple[str, ...]:
    """Set what jax will read, and return what the user should be told about it.

    Without a usable GPU, `num_cpu_devices` CPU devices are emulated. The user's own JAX_PLATFORMS,
    JAX_COMPILATION_CACHE_DIR and XLA_FLAGS are kept.

    Raises: RuntimeError if jax has been imported already, since it would not look again.
    """
    if "jax" in sys.modules:
        raise RuntimeError("prepare() must run before jax is imported")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "compiled"))
    if _runs_on_gpu():
        if deterministic:
            _add_flags("--xla_gpu_deterministic_ops=true")
        return ()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _add_flags(f"--xla_force_host_platform_device_count={num_cpu_devices}", replace=True)
    _add_flags(*COLLECTIVE_TIMEOUT_FLAGS)
    return _missing_plugin()


def cache_dir() -> Path:
    """Return where compiled programs are kept: OLMO_JAX_CACHE, or a folder in the user's cache."""
    own = os.environ.get("OLMO_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olmo_jax"


def _runs_on_gpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] != "cpu"
    return _has_gpu() and _has_gpu_plugin()


def _has_gpu() -> bool:
    # The driver's own listing: one folder a card. In a container without a card it is absent.
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _has_gpu_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{cuda}_plugin") for cuda in (12, 13))


def _missing_plugin() -> tuple[str, ...]:
    if os.environ.get("JAX_PLATFORMS") == "cpu" and _has_gpu() and not _has_gpu_plugin():
        return (
            "this machine has an NVIDIA GPU, but jax has no CUDA plugin here, so CPU devices are "
            "emulated; to use the GPU: pip install 'olmo_jax[cuda13]' (Python >= 3.12)",
        )
    return ()


def _add_flags(*flags: str, replace: bool = False) -> None:
    """Append to XLA_FLAGS the flags that the user has not set; with `replace`, all of them.

    XLA takes the last of two equal flags, and aborts the process on a flag that it does not know.
    """
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in given}
    new = [flag for flag in flags if replace or flag.split("=")[0] not in names]
    os.environ["XLA_FLAGS"] = " ".join([*given, *new])
