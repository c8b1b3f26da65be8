"""The prepared check for GPUs, as far as it goes without one."""

import importlib.util
from pathlib import Path

import pytest

from olmo_jax.plan.hardware import MACHINES
from olmo_jax.plan.plan import Plan
from tests.cases import layout_of


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("machine", "num_devices"), [("h100", 1), ("h200", 1), ("h200", 8)])
def test_the_benchmark_is_scaled_to_what_fits(tool, machine, num_devices):
    config = tool.scaled_benchmark(MACHINES[machine], num_devices)
    assert Plan(layout_of(config), MACHINES[machine]).fits
    assert config.model.num_experts % num_devices == 0
    batch = tool.random_batch(config)
    assert batch.tokens.shape == (config.train.global_batch, config.train.sequence_length)


@pytest.mark.matrix
def test_kernels_are_compared_with_plain_ones(tool):
    found = tool.check_kernels()
    assert found["passed"]
    assert found["grouped product"]["backend"] == "tiles"
    assert 0 < found["attention"]["q"] < tool.TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", ["grouped_matmul", "attention"])
def test_a_kernel_that_is_wrong_is_found(tool, kernel, monkeypatch):
    from olmo_jax.ops import attention, grouped_matmul

    module = {"grouped_matmul": grouped_matmul, "attention": attention}[kernel]
    right = getattr(module, kernel)

    def wrong(*arrays, **settings):
        off = 1.0 if settings.get("backend") == "dense" else 1.05
        return off * right(*arrays, **settings)

    monkeypatch.setattr(module, kernel, wrong)
    assert not tool.check_kernels()["passed"]


def test_without_data_the_trace_is_not_said_to_have_passed(tool):
    assert tool.check_trace(None)["passed"] is None
