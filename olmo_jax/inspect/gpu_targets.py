"""GPUs that XLA can compile for on a machine that has none: what its compiler asks of a device.

Source: XLA's public device specs (openxla/xla, xla/backends/gpu/target_config/specs: h100_sxm,
h200, b200), without their rates of single units, which compiling does not need.
"""

from typing import NamedTuple


class GpuTarget(NamedTuple):
    """The numbers in which these GPUs differ. Units: bytes, bytes/s, GHz."""

    name: str
    compute_capability: int
    cores: int
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    clock_ghz: float
    pcie_bytes_per_s: int


TARGETS = {
    "h100": GpuTarget(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=9,
        cores=132,
        memory_bytes=84_942_979_072,
        memory_bytes_per_s=3_352_320_000_000,
        l2_bytes=52_428_800,
        clock_ghz=1.98,
        pcie_bytes_per_s=2**35,
    ),
    "h200": GpuTarget(
        name="NVIDIA H200",
        compute_capability=9,
        cores=132,
        memory_bytes=151_397_597_184,
        memory_bytes_per_s=4_800_000_000_000,
        l2_bytes=52_428_800,
        clock_ghz=1.98,
        pcie_bytes_per_s=2**35,
    ),
    "b200": GpuTarget(
        name="NVIDIA B200",
        compute_capability=10,
        cores=148,
        memory_bytes=191_514_411_008,
        memory_bytes_per_s=7_672_320_000_000,
        l2_bytes=132_644_864,
        clock_ghz=1.965,
        pcie_bytes_per_s=2**36,
    ),
}

CUDNN = (9, 10, 0)
"""The version that the compiler is told of."""

_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_core": 233_472,
    "threads_per_core_limit": 2048,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "shared_memory_per_block_optin": 232_448,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
}
"""The same for all of them."""


def description(target: GpuTarget) -> str:
    """Return the target as the text of a GpuTargetConfigProto."""
    version = ".".join(map(str, CUDNN))
    numbers = _LIMITS | {
        "core_count": target.cores,
        "memory_bandwidth": target.memory_bytes_per_s,
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": target.memory_bytes,
        "pcie_bandwidth": target.pcie_bytes_per_s,
    }
    # 9.0a and not 9.0: the products of Mosaic and Triton use instructions that only the
    # architecture-specific target has, and ptxas refuses them for the plain one.
    major, minor, patch = CUDNN
    lines = [
        "gpu_device_info {",
        *(f"  {key}: {value}" for key, value in numbers.items()),
        f"  cuda_compute_capability {{ major: {target.compute_capability} "
        "feature_extension: ACCELERATED_FEATURES }",
        '  device_vendor: "NVIDIA Corporation"',
        f'  platform_version: "Compute Capability {target.compute_capability}.0a"',
        "  ecc_enabled: true",
        f'  name: "{target.name}"',
        '  driver_version: "13.0.0"',
        '  runtime_version: "12.8.0"',
        '  compile_time_toolkit_version: "12.8.0"',
        f'  dnn_version: "{version}"',
        "  device_interconnect_info { active_links: 18 }",
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
        f'device_description_str: "{target.name}"',
    ]
    return "\n".join(lines)
