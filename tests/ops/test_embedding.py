from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.ops.embedding import embed, sum_rows_by_id


@partial(jax.jit, static_argnums=3)
def weight_gradient(weight, tokens, gradient, dtype):
    return jax.vjp(lambda weight: embed(weight, tokens, dtype), weight)[1](gradient)[0]


def expected_gradient(weight, tokens, gradient):
    total = np.zeros(weight.shape)
    np.add.at(total, np.asarray(tokens), np.asarray(gradient, np.float64))
    return total


def test_rows_are_taken_and_cast():
    weight = jax.random.normal(jax.random.key(0), (11, 4))
    tokens = jnp.array([[3, 0, 10], [3, 3, 7]], jnp.int32)
    hidden = embed(weight, tokens, jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_array_equal(hidden, weight.astype(jnp.bfloat16)[tokens])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("length", "vocab"), [(1, 3), (75, 9), (300, 1000)])
def test_the_weight_gradient_is_the_sum_over_equal_tokens(dtype, length, vocab):
    weight = jnp.ones((vocab, 6))
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, vocab, jnp.int32)
    gradient = jax.random.normal(jax.random.key(2), (2, length, 6), dtype)
    actual = weight_gradient(weight, tokens, gradient, dtype)
    assert actual.dtype == jnp.float32
    # FP32 sums of at most 600 addends of order one.
    np.testing.assert_allclose(actual, expected_gradient(weight, tokens, gradient), 1e-5, 2e-5)


def test_16384_equal_tokens_give_16384_times_the_gradient_of_one():
    weight = jnp.zeros((8, 4))
    one = jax.random.normal(jax.random.key(0), (4,), jnp.bfloat16)
    gradient = jnp.broadcast_to(one, (16, 1024, 4))
    actual = weight_gradient(weight, jnp.full((16, 1024), 5, jnp.int32), gradient, jnp.bfloat16)
    np.testing.assert_allclose(actual[5], 16384 * one.astype(jnp.float32), rtol=1e-6)
    assert not np.any(np.delete(actual, 5, axis=0))


def test_the_order_of_the_tokens_does_not_change_exact_sums():
    # Small integers add exactly: a difference would be a row lost between tiles.
    ids = jax.random.randint(jax.random.key(3), (1000,), 0, 40, jnp.int32)
    rows = jax.random.randint(jax.random.key(4), (1000, 3), -9, 9).astype(jnp.bfloat16)
    total = jax.jit(sum_rows_by_id, static_argnums=2)
    np.testing.assert_array_equal(total(rows, ids, 40), total(rows[::-1], ids[::-1], 40))


def test_ids_outside_the_table_add_nothing():
    ids = jnp.array([-1, 2, 5, 2, 99], jnp.int32)
    total = sum_rows_by_id(jnp.ones((5, 2)), ids, 5)
    np.testing.assert_array_equal(total[:, 0], [0, 0, 2, 0, 0])


def test_no_place_is_named_twice_in_a_scatter():
    weight, tokens = jnp.zeros((9, 4)), jnp.zeros((2, 300), jnp.int32)
    gradient = jnp.zeros((2, 300, 4), jnp.bfloat16)
    program = jax.make_jaxpr(lambda w: weight_gradient(w, tokens, gradient, jnp.bfloat16))(weight)
    lines = str(program).split("scatter-add")
    assert len(lines) == 2
    assert "unique_indices=True" in lines[1]


def test_a_tied_head_and_the_embedding_add_up_in_one_fp32_gradient():
    weight = jax.random.normal(jax.random.key(5), (7, 4))
    tokens = jnp.array([[1, 1, 6]], jnp.int32)

    def both(weight):
        hidden = embed(weight, tokens, jnp.float32)
        return jnp.sum(hidden @ jax.lax.stop_gradient(weight).T) + jnp.sum(weight)

    alone = jax.grad(lambda weight: both(weight) - jnp.sum(weight))(weight)
    np.testing.assert_allclose(jax.grad(both)(weight), alone + 1.0, rtol=1e-6)


def test_shards_sum_their_own_tokens():
    weight = jnp.ones((4, 9, 3))
    tokens = jax.random.randint(jax.random.key(6), (4, 2, 50), 0, 9, jnp.int32)
    gradient = jax.random.normal(jax.random.key(7), (4, 2, 50, 3))

    def on_shard(weight, tokens, gradient):
        return weight_gradient(weight[0], tokens[0], gradient[0], jnp.float32)[None]

    spec = PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharded = jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    )(weight, tokens, gradient)
    for shard in range(4):
        wanted = expected_gradient(weight[shard], tokens[shard], gradient[shard])
        np.testing.assert_allclose(sharded[shard], wanted, 1e-5, 1e-5)
