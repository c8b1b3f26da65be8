"""Programs compiled for GPUs that are not here: targets, schedules, and the compiler itself."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from olmo_jax.errors import UserError
from olmo_jax.inspect import gpu_compile, hlo
from olmo_jax.inspect.gpu_report import group_text
from olmo_jax.inspect.gpu_schedule import backends, host_waits, is_product, times_of, transfers
from olmo_jax.inspect.gpu_targets import TARGETS, description
from olmo_jax.inspect.jaxpr import Loop
from olmo_jax.ops import attention, grouped_matmul
from olmo_jax.ops.target import Target, here, tracing_for

HAS_COMPILER = not list(gpu_compile._missing())


@pytest.fixture(scope="module")
def h200_step():
    return hlo.parse(Path(__file__).with_name("h200_step.hlo").read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_a_description_has_every_number_once(name):
    text = description(TARGETS[name])
    keys = re.findall(r"^ *(\w+):", text, re.MULTILINE)
    assert len(set(keys)) == len(keys)
    assert text.count("{") == text.count("}")
    assert f"device_memory_size: {TARGETS[name].memory_bytes}\n" in text


def test_memory_of_the_targets_is_that_of_the_machines_or_a_little_more():
    from olmo_jax.plan.hardware import MACHINES

    for name, target in TARGETS.items():
        assert target.memory_bytes == pytest.approx(MACHINES[name].memory_bytes, rel=0.01)


def test_operations_choose_by_the_target_that_is_given():
    choose = grouped_matmul.default_backend
    assert choose(*here()) == "tiles"
    with tracing_for(Target("cuda", "9.0")):
        assert choose(*here()) == "mosaic"
        found = attention.default_backend(jnp.bfloat16, 128, 64, segmented=True)
        assert found == "cudnn"
    with tracing_for(Target("cuda", "8.0")):
        assert choose(*here()) == "large_tiles"
    assert here() == Target(jax.devices()[0].platform)


def test_what_is_issued_between_start_and_done_is_beside_a_transfer(h200_step):
    found = transfers(h200_step)
    assert [each.collective.kind for each in found] == [
        each.kind for each in hlo.collectives(h200_step)
    ]
    asynchronous = [each for each in found if each.asynchronous]
    assert asynchronous
    for each in found:
        assert each.products <= each.kernels
        assert each.asynchronous or each.kernels == 0
    # As the file reads: one start, one kernel that multiplies, its done.
    scatter = next(each for each in asynchronous if each.collective.kind == "reduce_scatter")
    lines = Path(__file__).with_name("h200_step.hlo").read_text().splitlines()
    start = next(
        i for i, line in enumerate(lines) if "= ((bf16" in line and "reduce-scatter-start(" in line
    )
    done = next(i for i, line in enumerate(lines) if "reduce-scatter-done(" in line and i > start)
    between = [
        line for line in lines[start + 1 : done] if re.search(r" (fusion|custom-call)\(", line)
    ]
    assert scatter.kernels == len(between)


def test_products_are_told_from_other_kernels(h200_step):
    fusions = [each for each, _ in hlo.instructions(h200_step) if each.opcode == "fusion"]
    products = {each.name for each in fusions if is_product(h200_step, each)}
    assert products
    assert all("gemm" in name or "dot" in name for name in products)
    assert len(products) < len({each.name for each in fusions})


CALLS = """HloModule calls

%inner (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  ROOT %d = f32[2,2] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2] parameter(0)
  %one = f32[2,2] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %two = f32[2,2] custom-call(%one), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %three = f32[2,2] custom-call(%two), custom_call_target="__cublas$gemm"
  %four = f32[2,2] custom-call(%three), custom_call_target="mosaic_gpu_v2"
  %five = f32[2,2] custom-call(%four), custom_call_target="Sharding"
  ROOT %g = f32[2,2] fusion(%five), calls=%inner, backend_config={"kind":"__triton_gemm"}
}
"""


def test_backends_are_named(h200_step):
    assert backends(hlo.parse(CALLS)) == {
        "cuDNN attention": 2,
        "cuBLAS product": 1,
        "Mosaic kernel (grouped product)": 1,
        "Triton product": 1,
    }
    # A program of Triton's own fusions and XLA's alone calls no library.
    assert backends(h200_step) == {}


WAITS = """HloModule waits

%body (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %next = s32[] add(%p, %p)
}

%test (q: s32[]) -> pred[] {
  %q = s32[] parameter(0)
  ROOT %more = pred[] compare(%q, %q), direction=LT
}

ENTRY %main (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  %open = s32[] while(%x), condition=%test, body=%body
  %ask = s32[] custom-call(%open), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %branch = s32[] conditional(%ask, %ask), branch_computations={%body, %body}
}
"""


def test_what_makes_the_host_wait_is_listed(h200_step):
    assert host_waits(h200_step) == []
    assert host_waits(hlo.parse(WAITS)) == [
        *("loop without a trip count open", "host callback ask", "conditional branch"),
    ]


def test_times_are_those_of_all_loops():
    assert times_of((Loop("", 4), Loop("", 3))) == 12
    assert times_of((Loop("", 4), Loop("", None))) is None


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), "2 x 4: 0-3"),
        (((0, 4), (1, 5), (2, 6), (3, 7)), "4 x 2: 0-4 by 4"),
        (((0, 4, 1, 5, 2), (3, 6, 7, 8, 9)), "2 x 5: 0,4,1,5,..."),
        ((), "1 x 8: 0-7"),
    ],
)
def test_groups_in_few_words(h200_step, groups, words):
    one = transfers(h200_step)[0]
    collective = type(one.collective)(
        **{**vars(one.collective), "groups": groups, "kind": "reduce"}
    )
    assert group_text(one._replace(collective=collective), 8) == words


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler for GPUs is installed")
def test_without_the_extra_the_command_says_what_to_install():
    with pytest.raises(UserError, match=r"needs .*; install 'olmo_jax\[gpu-compile\]' on Python"):
        gpu_compile.require_compiler()


def compiled(*arguments):
    """Return what the command says; a process of its own, since jax must not look for a driver."""
    command = [sys.executable, "-m", "olmo_jax.cli", "compile", "configs/quickstart.yaml"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, *arguments, "--json"], cwd=root, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs the extra gpu-compile (Python >= 3.12)")
@pytest.mark.parametrize("target", TARGETS)
def test_the_quickstarts_step_compiles_for_gpus_that_are_not_here(target):
    found = compiled("model.num_layers=3", "--target", target)
    assert found["host_waits"] == []
    assert ("Mosaic kernel (grouped product)" in found["backends"]) == (target != "b200")
    assert "cuDNN attention" in found["backends"]
    planned = found["planned_memory_bytes"]
    assert found["memory_bytes"]["state"] == pytest.approx(planned["state"], rel=0.01)
    assert found["sent_bytes"] == pytest.approx(found["planned_sent_bytes"], rel=0.01)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs the extra gpu-compile (Python >= 3.12)")
def test_in_every_steady_tick_both_transfers_have_products_beside_them():
    """Those of the warm-up, without a backward, and of the cool-down are exposed."""
    stages = ("model.num_layers=5", "mesh.pipeline=2", "mesh.data=1", "parallel.pipeline_chunks=2")
    found = compiled(*stages, "--target", "h200")
    assert found["host_waits"] == []
    permutes = [each for each in found["collectives"] if each["kind"] == "permute"]
    assert all(each["asynchronous"] for each in permutes)
    ends, steady = (
        [each for each in permutes if (each["places"] == 1) == is_end] for is_end in (True, False)
    )
    assert len(ends) == len(steady) == 2
    # Warm-up and cool-down have P V - 1 ticks; a period has a loss, or a turn, or neither.
    assert [each["times"] for each in ends] == [3, 3]
    assert all(min(each["products_beside"]) > 0 for each in steady)
