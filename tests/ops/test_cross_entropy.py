from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.ops.cross_entropy import cross_entropy

TOKENS, WIDTH, VOCAB = 50, 8, 21
WEIGHTS = (0.7, 0.01)  # of the two sums in the loss whose gradient is compared


def make_inputs(dtype=jnp.float32, tokens=TOKENS):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, WIDTH)).astype(dtype)
    weight = jax.random.normal(keys[1], (WIDTH, VOCAB))
    labels = jax.random.randint(keys[2], (tokens,), 0, VOCAB, jnp.int32)
    return hidden, weight, labels.at[::7].set(-100)


def dense(hidden, weight, labels):
    """Both sums and the gradients of their weighted sum, in float64."""
    hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    counted = np.asarray(labels) != -100
    rows, targets = np.arange(len(labels))[counted], np.asarray(labels)[counted]
    logits = hidden @ weight
    normaliser = np.log(np.sum(np.exp(logits), axis=1))
    entropy = np.sum(normaliser[rows] - logits[rows, targets])
    slope = np.exp(logits - normaliser[:, None])
    slope *= (WEIGHTS[0] + 2 * WEIGHTS[1] * normaliser)[:, None]
    slope[rows, targets] -= WEIGHTS[0]
    slope[~counted] = 0.0
    return (entropy, np.sum(normaliser[rows] ** 2)), (slope @ weight.T, hidden.T @ slope)


@partial(jax.jit, static_argnums=3)
def sums_and_gradients(hidden, weight, labels, chunk_tokens):
    sums, backward = jax.vjp(
        partial(cross_entropy, labels=labels, chunk_tokens=chunk_tokens), hidden, weight
    )
    return sums, backward(tuple(jnp.float32(weight) for weight in WEIGHTS))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 25, 50, 1000])
def test_any_chunk_size_gives_the_sums_and_gradients_of_all_logits_at_once(chunk_tokens):
    inputs = make_inputs()
    wanted, wanted_gradients = dense(*inputs)
    sums, gradients = sums_and_gradients(*inputs, chunk_tokens)
    np.testing.assert_allclose(sums, wanted, rtol=1e-5)
    for actual, expected in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(actual, expected, 1e-4, 2e-5)


@pytest.mark.parametrize("num_chunks", [1, 64])
def test_a_bf16_head_has_an_fp32_weight_gradient_that_chunks_do_not_wear_down(num_chunks):
    inputs = make_inputs(jnp.bfloat16, tokens=1024)
    _, (hidden, weight) = sums_and_gradients(*inputs, 1024 // num_chunks)
    _, (wanted_hidden, wanted_weight) = dense(*inputs)
    assert (hidden.dtype, weight.dtype) == (jnp.bfloat16, jnp.float32)
    # 3 %: weight, logit slope and hidden state are bf16, the sum is not.
    assert np.linalg.norm(weight - wanted_weight) < 0.03 * np.linalg.norm(wanted_weight)
    difference = np.asarray(hidden, np.float32) - wanted_hidden
    assert np.linalg.norm(difference) < 0.03 * np.linalg.norm(wanted_hidden)


def test_equal_addends_of_many_chunks_do_not_stand_still():
    # bf16 would stop adding at 256 equal addends; one chunk per token makes 1024 of them.
    hidden = jnp.ones((1024, 1), jnp.bfloat16)
    labels = jnp.zeros((1024,), jnp.int32)
    _, (_, weight) = sums_and_gradients(hidden, jnp.zeros((1, 2)), labels, 1)
    _, (_, single) = sums_and_gradients(hidden[:1], jnp.zeros((1, 2)), labels[:1], 1)
    np.testing.assert_allclose(weight, 1024 * single, rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_the_hidden_state_of_an_ignored_token_changes_nothing(poison):
    hidden, weight, labels = make_inputs()
    poisoned = jnp.where((labels == -100)[:, None], poison, hidden)
    clean = sums_and_gradients(hidden, weight, labels, 16)
    dirty = sums_and_gradients(poisoned, weight, labels, 16)
    chex.assert_trees_all_equal(clean, dirty)
    assert not np.any(np.asarray(clean[1][0])[np.asarray(labels) == -100])


def test_no_counted_token_gives_zeros():
    hidden, weight, labels = make_inputs()
    result = sums_and_gradients(hidden, weight, jnp.full_like(labels, -100), 16)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(result))


def test_the_logits_of_all_tokens_are_never_held():
    tokens, vocab = 2048, 1024
    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((WIDTH, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    program = sums_and_gradients.lower(*shapes, 64).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 4


def test_shards_and_recomputation_give_the_same_values():
    hidden, weight, labels = make_inputs(tokens=4 * TOKENS)
    weights = jnp.stack([weight] * 4)

    def on_shard(hidden, weight, labels):
        loss = jax.checkpoint(partial(cross_entropy, labels=labels, chunk_tokens=16))
        sums, backward = jax.vjp(loss, hidden, weight[0])
        seeds = tuple(total * 0 + weight for total, weight in zip(sums, WEIGHTS, strict=True))
        hidden_gradient, weight_gradient = backward(seeds)
        return hidden_gradient, weight_gradient[None]

    spec = PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    of_hidden, of_weight = jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    )(hidden, weights, labels)
    _, wanted = dense(hidden, weight, labels)
    np.testing.assert_allclose(of_hidden, wanted[0], 1e-4, 2e-5)
    np.testing.assert_allclose(np.sum(of_weight, axis=0), wanted[1], 1e-4, 1e-4)
