"""The contract of a small data-parallel step, and the table that the tool prints of it."""

import importlib.util
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from olmo_jax.inspect import MICROBATCHES, Total, measure

SIZES = {"pipeline": 1, "data": 8, "expert": 1}


def load_tool():
    path = Path(__file__).parents[2] / "tools" / "show_contract.py"
    spec = importlib.util.spec_from_file_location("show_contract", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_step(weight, x):
    def microbatch(total, x):
        grad = jax.grad(lambda w: jnp.tanh(x @ w).sum())(lax.pcast(weight, "data", to="varying"))
        return total + grad, None

    with jax.named_scope(MICROBATCHES):
        zeros = lax.pcast(jnp.zeros_like(weight), "data", to="varying")
        total, _ = lax.scan(microbatch, zeros, x)
    shard = lax.psum_scatter(total, "data", scatter_dimension=0, tiled=True)
    return weight - lax.all_gather(shard, "data", tiled=True, to="invarying")


def trace(num_microbatches):
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(SIZES.values())), tuple(SIZES))

    def argument(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    specs = (P(), P(None, "data"))
    step = jax.jit(
        jax.shard_map(train_step, mesh=mesh, in_specs=specs, out_specs=P()), donate_argnums=0
    )
    weight, x = argument((16, 8), P()), argument((num_microbatches, 32, 16), specs[1])
    return step.trace(weight, x)


@pytest.fixture(scope="module")
def contracts():
    return {number: measure(trace(number), SIZES) for number in (1, 4)}


def test_communication_of_a_ddp_step_does_not_depend_on_microbatches(contracts):
    sent = 16 * 8 * 4 * 7 / 8
    for contract in contracts.values():
        assert contract.totals == [
            Total(False, "all_gather", ("data",), "float32", 1, sent),
            Total(False, "reduce_scatter", ("data",), "float32", 1, sent),
        ]
        kinds = {"all_gather": 1, "reduce_scatter": 1}
        assert contract.compiled_kinds(in_loop=False) == kinds
        assert contract.compiled_kinds(in_loop=True) == {}


def test_flops_grow_with_microbatches_and_the_weight_is_donated(contracts):
    assert contracts[4].matmul_flops == 4 * contracts[1].matmul_flops == 4 * 4 * 4 * 16 * 8
    assert [loop.length for loop in contracts[4].loops] == [4]
    for contract in contracts.values():
        assert contract.donated == {0: 16 * 8 * 4}
        assert contract.memory["alias"] == 16 * 8 * 4
        assert (contract.conditionals, contract.callbacks, contract.scatter_adds) == (0, 0, 0)


def test_the_tool_prints_a_column_for_each_number_of_microbatches(contracts):
    console = Console(width=120, file=io.StringIO())
    console.print(load_tool().contract_table(contracts, "quickstart on data=8"))
    text = console.file.getvalue()
    for expected in (
        "quickstart on data=8",
        "M = 1",
        "M = 4",
        "once    reduce_scatter float32 over data",
        "1 x, 448 B",
        "float scatter-adds with repeated indices",
        "donated",
    ):
        assert expected in text
    (loops,) = (line for line in text.splitlines() if "trip counts" in line)
    assert [cell.strip() for cell in loops.split("│")[2:4]] == ["none", "4"]


def test_the_tool_names_a_wrong_config_and_asks_for_one(capsys):
    tool = load_tool()
    assert tool.main([]) == 2
    assert "Usage" in capsys.readouterr().err
    assert tool.main(["no_such.yaml"]) == 1
    assert "no_such.yaml cannot be read" in capsys.readouterr().err
