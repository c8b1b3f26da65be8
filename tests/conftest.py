"""Eight emulated devices, one compilation cache, exact products: set before jax is imported."""

import gc
import os
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    # Tests compile much and run little. Without the fusion emitters, which newer versions always
    # use, and without LLVM's passes a step compiles in a fifth of the time.
    "--xla_backend_optimization_level=0",
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


MOST_MAPPED_REGIONS = 20_000


def pytest_configure(config):
    # Two workers share the cache: a file that the other one is still writing is a miss.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning"
    )


@pytest.fixture
def signals_of_a_terminal():
    """Undo what nohup and a shell's `&` ignore, here and in the processes that a test starts."""
    given = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in given.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def mesh_of():
    """Return a function from axis sizes (1 where not given) to the mesh of all five axes."""
    from olmo_jax.mesh.axes import AXES
    from olmo_jax.mesh.devices import build_mesh

    return lambda **sizes: build_mesh(dict.fromkeys(AXES, 1) | sizes)


@pytest.fixture(scope="session")
def recipes():
    """Return the published models by name."""
    from tests.recipes import RECIPES

    return RECIPES


@pytest.fixture(scope="session")
def program_of():
    """Return a function from a config to its program, each built and compiled once a session."""
    from functools import cache

    from olmo_jax.mesh.devices import build_mesh
    from olmo_jax.train.program import build

    return cache(lambda config: build(config, build_mesh(dict(config.mesh))))


@pytest.fixture(autouse=True)
def _few_mapped_regions(program_of):
    """Give up compiled programs before there are too many.

    Each has some hundred regions of memory of its own. Linux allows a process 65,530 by default,
    and XLA crashes when it is given no more.
    """
    yield
    if _num_mapped_regions() > MOST_MAPPED_REGIONS:
        import jax

        program_of.cache_clear()
        jax.clear_caches()
        gc.collect()


def _num_mapped_regions():
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
