"""The seam between the weights that a device keeps and their FP32 gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.specs import Spec, added_axes
from olmo_jax.ops.linear import linear
from olmo_jax.ops.varying import vary_everywhere
from olmo_jax.parallel import fsdp, unshard
from olmo_jax.parallel.ddp import attach
from olmo_jax.parallel.reductions import max_everywhere, sum_everywhere, sum_over

BF16 = jnp.dtype(jnp.bfloat16)


def test_the_gradient_of_a_bf16_weight_is_fp32_and_goes_to_its_accumulator():
    weight = jnp.full((3, 2), 1 / 3, jnp.bfloat16)
    x = jnp.ones((4096, 3), jnp.bfloat16)

    def loss(accumulator):
        shards = {"w": unshard.WeightShard(weight, accumulator, dtype=BF16), "mask": jnp.ones(2)}
        read, rows = unshard.unshard({"unit": shards}, x)
        read = read["unit"]
        assert read["w"].dtype == jnp.float32
        return linear(rows, read["w"]).astype(jnp.float32).sum() + read["mask"].sum()

    gradient = jax.grad(loss)(jnp.zeros((3, 2)))
    assert gradient.dtype == jnp.float32
    # A bf16 sum of ones would stall at 256.
    np.testing.assert_array_equal(gradient, np.full((3, 2), 4096.0))


def test_a_weight_is_read_as_it_is_stored():
    stored = jnp.asarray([1 / 3, 2 / 3], jnp.bfloat16)
    np.testing.assert_array_equal(attach(stored, jnp.zeros(2)), stored.astype(jnp.float32))


@pytest.fixture(scope="module")
def mesh(mesh_of):
    return mesh_of(data=2, fsdp=2, expert=2)


def test_gradients_stay_on_the_device_until_they_are_reduced(mesh):
    def step(weight, x):
        weights = vary_everywhere({"w": weight})

        def loss(accumulators):
            weight, rows = unshard.unshard(unshard.WeightShard(weights["w"], accumulators["w"]), x)
            return linear(rows, weight).sum()

        return jax.grad(loss)(unshard.zeros(weights))["w"][None]

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P(AXES))
    x = np.arange(8, dtype=np.float32)[:, None]
    traced = jax.jit(run).trace(np.ones((1, 1), np.float32), x)
    assert "psum" not in str(traced.jaxpr)
    own = jax.jit(run)(np.ones((1, 1), np.float32), x)
    np.testing.assert_array_equal(own[:, 0, 0], x[:, 0])


LEAVES = {
    "leading_dim": (P(None, None), P(("fsdp", "expert"), None)),
    "last_dim": (P(None, None), P(None, ("fsdp", "expert"))),
    "an_axis_each": (P(None, None), P("expert", "fsdp")),
    "one_axis": (P(None, None), P("fsdp", None)),
    "experts": (P("expert", None), P(("expert", "fsdp"), None)),
    "not_divided": (P(None, None), P(None, None)),
}


@pytest.mark.parametrize("gathered", [False, True], ids=["at_use", "before"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_divided_weight_is_read_whole_in_bf16_and_its_gradient_is_summed(name, gathered, mesh):
    compute, resident = LEAVES[name]
    draw = np.random.default_rng(0)
    main = draw.normal(size=(8, 12)).astype(np.float32)
    # As many cotangents as ranks: each its own, of the part of the weight that it computes with.
    rows = 4 if compute[0] == "expert" else 8
    cotangents = draw.normal(size=(8, rows, 12)).astype(np.float32)
    added = added_axes(Spec(*compute), Spec(*resident))

    def step(shard, cotangent):
        own = vary_everywhere({"w": shard})["w"]
        weight = fsdp.gather(own, added, BF16) if gathered else own

        def read(accumulator):
            return unshard.unshard(
                unshard.WeightShard(weight, accumulator, added, gathered=gathered, dtype=BF16), ()
            )[0]

        whole, pull = jax.vjp(read, unshard.zeros({"w": own})["w"])
        return whole[None], pull(cotangent[0])[0][None]

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(resident, P(AXES)), out_specs=(P(AXES), P(AXES)))
    )
    whole, gradients = map(np.asarray, run(main, cotangents))
    rounded = main.astype(BF16).astype(np.float32)
    coordinates: list[dict[str, Any]] = [
        dict(zip(AXES, np.unravel_index(rank, (1, 2, 2, 2, 1)), strict=True)) for rank in range(8)
    ]
    used = {axis for _, axes in added for axis in axes}
    for rank, coordinate in enumerate(coordinates):
        half = (
            slice(4 * coordinate["expert"], 4 * coordinate["expert"] + 4)
            if rows == 4
            else slice(None)
        )
        np.testing.assert_array_equal(whole[rank], rounded[half])
        group = [
            r
            for r, other in enumerate(coordinates)
            if all(other[axis] == coordinate[axis] for axis in AXES if axis not in used)
        ]
        summed = cotangents[group].sum(axis=0)
        for dim, axes in added:
            parts = np.split(summed, 2 ** len(axes), axis=dim)
            summed = parts[
                int(np.ravel_multi_index([coordinate[a] for a in axes], [2] * len(axes)))
            ]
        np.testing.assert_allclose(gradients[rank], summed, rtol=1e-6, atol=1e-6)


def test_sums_and_maxima_over_ranks(mesh):
    def reductions(value):
        some = sum_over(value, ("data", "fsdp"))
        return some, sum_everywhere({"a": value[0]})["a"], max_everywhere(value[0])

    run = jax.shard_map(reductions, mesh=mesh, in_specs=P(AXES), out_specs=(P(AXES), P(), P()))
    some, every, most = jax.jit(run)(np.arange(8))
    # Ranks with the same coordinate along `expert` are 0 2 4 6 and 1 3 5 7.
    np.testing.assert_array_equal(some, [12, 16] * 4)
    assert (every, most) == (28, 7)
