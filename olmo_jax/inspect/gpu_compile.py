"""Compile a config's step for GPUs that are not there, and read what XLA made of it."""

import importlib.util
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from olmo_jax.config import Config
from olmo_jax.errors import UserError
from olmo_jax.inspect import hlo
from olmo_jax.inspect.gpu_schedule import Transfer, backends, host_waits, transfers
from olmo_jax.inspect.gpu_targets import TARGETS, description
from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.target import Target, tracing_for
from olmo_jax.plan.command import sizes_for
from olmo_jax.rules import with_mesh
from olmo_jax.train.program import COMPILER_OPTIONS, build

NEEDED = {
    "jax_cuda13_plugin": "XLA's GPU compiler",
    "nvidia.cu13": "ptxas",
    "nvidia.cudnn": "cuDNN",
    "tokamax": "the grouped product",
}
"""Modules of the extra `gpu-compile`, and what each is for."""


def require_compiler() -> None:
    """Check that the compiler for GPUs is installed.

    Raises: UserError that names what is missing, and how to install it.
    """
    if missing := list(_missing()):
        version = ".".join(map(str, sys.version_info[:2]))
        raise UserError(
            f"compiling for a GPU needs {', '.join(missing)}, which Python {version} has not got "
            "here; install 'olmo_jax[gpu-compile]' on Python >= 3.12 (about 800 MB)"
        )


def _missing() -> Iterator[str]:
    for module, purpose in NEEDED.items():
        parent = module.partition(".")[0]
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None:
            yield f"{module} ({purpose})"


@dataclass(frozen=True)
class Compiled:
    """A step as XLA compiled it for one target. Units: bytes of one device, seconds."""

    config: Config
    sizes: dict[str, int]
    target: str
    text: str
    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    trace_s: float
    compile_s: float
    transfers: list[Transfer]
    backends: dict[str, int]
    host_waits: list[str]


def topology(target: str, num_devices: int, devices_per_node: int) -> list[Any]:
    """Return devices of that kind, node by node, for the compiler alone.

    Raises: UserError if they do not fill whole nodes.
    """
    local = min(num_devices, devices_per_node)
    if num_devices % local:
        raise UserError(
            f"--devices {num_devices} does not fill nodes of {local}; use a multiple of {local}, "
            "or another --devices-per-node"
        )
    found = topologies.get_topology_desc(
        platform="cuda",
        topology=f"{num_devices // local}x1x{local}",
        target_config=description(TARGETS[target]),
    )
    return list(found.devices)


def compile_for(
    config: Config, target: str, num_devices: int, devices_per_node: int = 8
) -> Compiled:
    """Trace the config's step for so many devices, and compile it.

    Raises: UserError if the mesh does not fit the devices, or the compiler is not installed.
    """
    require_compiler()
    # tokamax says at length that it has measured no tile sizes for this GPU.
    logging.getLogger("absl").setLevel(logging.ERROR)
    sizes = sizes_for(config, num_devices)
    config, devices = with_mesh(config, sizes), topology(target, num_devices, devices_per_node)
    mesh = Mesh(np.array(devices).reshape([sizes[axis] for axis in AXES]), AXES)
    program = build(config, mesh)
    jitted, arguments = program.jitted, program.abstract_arguments()
    capability = f"{TARGETS[target].compute_capability}.0"
    start = time.perf_counter()
    # `tracing_for` chooses our backends by the target. tokamax looks at the default device instead.
    with tracing_for(Target("cuda", capability)), jax.default_device(devices[0]):
        lowered = jitted.lower(*arguments)
    traced = time.perf_counter()
    options = COMPILER_OPTIONS | {"xla_gpu_deterministic_ops": config.train.deterministic}
    compiled = lowered.compile(compiler_options=options)
    end = time.perf_counter()
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    module = hlo.parse(text)
    return Compiled(
        config=config,
        sizes=sizes,
        target=target,
        text=text,
        argument_bytes=analysis.argument_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
        trace_s=traced - start,
        compile_s=end - traced,
        transfers=transfers(module),
        backends=backends(module),
        host_waits=host_waits(module),
    )
