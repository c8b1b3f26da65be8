"""Eight emulated devices, one compilation cache, exact matrix products: set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=600"
)
