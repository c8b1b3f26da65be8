"""The seam between compute weights and their FP32 gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.linear import linear
from olmo_jax.parallel import ddp
from olmo_jax.parallel.sums import max_everywhere, sum_everywhere, sum_over


def test_the_gradient_of_a_bf16_weight_is_fp32_and_goes_to_its_sink():
    weight = {"w": jnp.full((3, 2), 1 / 3, jnp.bfloat16)}
    x = jnp.ones((4096, 3), jnp.bfloat16)

    def loss(sinks):
        read = ddp.read({"unit": ddp.pair(weight, sinks), "mask": jnp.ones(2)})
        assert read["unit"]["w"].dtype == jnp.float32
        return linear(x, read["unit"]["w"]).astype(jnp.float32).sum() + read["mask"].sum()

    gradient = jax.grad(loss)({"w": jnp.zeros((3, 2))})["w"]
    assert gradient.dtype == jnp.float32
    # A bf16 sum of ones would stall at 256.
    np.testing.assert_array_equal(gradient, np.full((3, 2), 4096.0))


def test_a_weight_is_read_as_it_is_stored():
    stored = jnp.asarray([1 / 3, 2 / 3], jnp.bfloat16)
    np.testing.assert_array_equal(ddp.attach(stored, jnp.zeros(2)), stored.astype(jnp.float32))


@pytest.fixture(scope="module")
def mesh(mesh_of):
    return mesh_of(data=2, fsdp=2, expert=2)


def test_gradients_stay_on_the_device_until_they_are_reduced(mesh):
    def step(weight, x):
        weights = ddp.resident({"w": weight})

        def loss(sinks):
            return (linear(x, ddp.read(ddp.pair(weights, sinks))["w"])).sum()

        return jax.grad(loss)(ddp.zeros(weights))["w"][None]

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P(AXES))
    x = np.arange(8, dtype=np.float32)[:, None]
    traced = jax.jit(run).trace(np.ones((1, 1), np.float32), x)
    assert "psum" not in str(traced.jaxpr)
    own = jax.jit(run)(np.ones((1, 1), np.float32), x)
    np.testing.assert_array_equal(own[:, 0, 0], x[:, 0])


def test_sums_and_maxima_over_ranks(mesh):
    def reductions(value):
        some = sum_over(value, ("data", "fsdp"))
        return some, sum_everywhere({"a": value[0]})["a"], max_everywhere(value[0])

    run = jax.shard_map(reductions, mesh=mesh, in_specs=P(AXES), out_specs=(P(AXES), P(), P()))
    some, every, most = jax.jit(run)(np.arange(8))
    # Ranks with the same place along `expert` are 0 2 4 6 and 1 3 5 7.
    np.testing.assert_array_equal(some, [12, 16] * 4)
    assert (every, most) == (28, 7)
