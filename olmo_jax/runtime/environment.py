"""What jax reads from the environment, set before its import."""

import importlib.util
import os
import sys
from pathlib import Path

from olmo_jax.config.records import Platform
from olmo_jax.errors import UserError
from olmo_jax.runtime.platform import (
    JAX_PLATFORMS,
    has_gpu,
    has_gpu_plugin,
    listed,
    num_visible_gpus,
    runs_on_gpu,
)
from olmo_jax.runtime.processes import Processes

# XLA:CPU aborts the process when a device reaches a collective this much later than the first one.
# With more emulated devices than cores that happens at the 40 s which are the default.
COLLECTIVE_TIMEOUT_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


# Those that gRPC looks at.
NO_PROXY = "no_grpc_proxy"
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")

DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


def prepare(
    num_cpu_devices: int,
    processes: Processes | None = None,
    *,
    deterministic: bool = False,
    platform: Platform | None = None,
) -> tuple[str, ...]:
    """Set what jax will read, and return what the user should be told about it.

    Without a usable GPU, or if `platform` says so, `num_cpu_devices` CPU devices are emulated, in
    equal parts by the processes of the job. The user's own JAX_PLATFORMS, JAX_COMPILATION_CACHE_DIR
    and XLA_FLAGS are kept. `platform` is mesh.platform; None takes what is there.

    Raises: RuntimeError if jax has been imported already, since it would not look again; UserError
    if the devices do not divide over the processes, or are not there (`runs_on_gpu`).
    """
    if "jax" in sys.modules:
        raise RuntimeError("prepare() must run before jax is imported")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "compiled"))
    processes = processes or Processes()
    if processes.several:
        _keep_from_proxies(processes.coordinator.rpartition(":")[0])
    on_gpu, given = runs_on_gpu(platform), listed()
    if given:
        # jax takes "gpu" for two platforms, and asks for both.
        os.environ[JAX_PLATFORMS] = ",".join(given)
    if on_gpu:
        if deterministic:
            _add_flags(DETERMINISTIC_FLAG)
        return ()
    here = cpu_devices_here(num_cpu_devices, processes)
    # One that is empty says nothing.
    os.environ[JAX_PLATFORMS] = os.environ.get(JAX_PLATFORMS) or "cpu"
    _add_flags(f"--xla_force_host_platform_device_count={here}", replace=True)
    _add_flags(*COLLECTIVE_TIMEOUT_FLAGS)
    return () if platform == "cpu" else _missing_plugin()


def prepare_compiler() -> None:
    """Set what jax will read so that it compiles for GPUs without one, and no driver is looked for.

    XLA takes the `ptxas` that comes first on PATH: that of the installed wheel, not an older one.

    Raises: RuntimeError if jax has been imported already.
    """
    if "jax" in sys.modules:
        raise RuntimeError("prepare_compiler() must run before jax is imported")
    os.environ["JAX_PLATFORMS"] = "cpu"
    # What XLA notes on the way is about the GPU that it does not find.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # It writes such programs to its cache, and cannot read them back.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    wheel = importlib.util.find_spec("nvidia")
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        binaries = Path(folder) / "cu13" / "bin"
        os.environ["PATH"] = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"


def cache_dir() -> Path:
    """Return where compiled programs are kept: OLMO_JAX_CACHE, or a folder in the user's cache."""
    own = os.environ.get("OLMO_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olmo_jax"


def cpu_devices_here(num_devices: int, processes: Processes) -> int:
    """Return how many of the mesh's CPU devices this process emulates.

    Raises: UserError if the processes cannot have equal parts.
    """
    if processes.devices_per_process is not None:
        return processes.devices_per_process
    if num_devices % processes.count:
        raise UserError(
            f"{processes.count} processes for a mesh of {num_devices} CPU devices: each process "
            "emulates as many as the next, so the number of processes divides the devices; start "
            "another number of them, or write other mesh.* sizes"
        )
    return num_devices // processes.count


def local_devices(processes: Processes) -> list[int] | None:
    """Return which GPUs of its node this process takes, one by default; None takes all it sees."""
    if not runs_on_gpu() or processes.local_index is None:
        return None
    size = processes.devices_per_process or 1
    # A scheduler may show each process its own GPUs only; they are then numbered from 0.
    if num_visible_gpus() == size:
        return None
    return list(range(processes.local_index * size, (processes.local_index + 1) * size))


def _keep_from_proxies(host: str) -> None:
    """Let gRPC reach the coordinator itself where the shell has a proxy for the web."""
    if any(os.environ.get(name) for name in PROXIES):
        known = os.environ.get(NO_PROXY) or os.environ.get("no_proxy")
        os.environ[NO_PROXY] = f"{known},{host}" if known else host


def _missing_plugin() -> tuple[str, ...]:
    if os.environ.get(JAX_PLATFORMS) == "cpu" and has_gpu() and not has_gpu_plugin():
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
