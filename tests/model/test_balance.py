"""Counts, the auxiliary losses and the bias rule: what they mean."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.config.records import RouterConfig
from olmo_jax.model.balance import balance_sum, balance_terms, bias_update, expert_counts, z_sum
from olmo_jax.model.router import route
from tests.model.losses import balance_loss, z_loss

SCOPES = ["instance", "microbatch", "global"]


class Batch(NamedTuple):
    config: RouterConfig
    logits: jax.Array
    scores: jax.Array
    experts: jax.Array


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def batch(rows=3, top_k=2, gating="softmax", scope="instance"):
    """Return what a router over 8 experts made of rows of 8 tokens."""
    logits = normal(rows, 8, 8)
    gate = jax.nn.sigmoid if gating == "sigmoid" else jax.nn.softmax
    experts = jnp.asarray(np.argsort(-np.asarray(logits))[..., :top_k], jnp.int32)
    return Batch(RouterConfig(gating=gating, balance_scope=scope), logits, gate(logits), experts)


def padding(*real_tokens):
    """Mark so many of each row's 8 positions as real; by default all, a part, and none."""
    return jnp.asarray(np.arange(8) < np.array(real_tokens or (8, 5, 0))[:, None])


def test_counts_are_numpy_s_and_sum_to_real_tokens_times_top_k():
    found = batch()
    real = padding()
    counts = expert_counts(found.experts, real, 8)
    assert counts.dtype == jnp.int32
    for row in range(3):
        chosen = np.asarray(found.experts)[row][np.asarray(real)[row]]
        np.testing.assert_array_equal(counts[row], np.bincount(chosen.ravel(), minlength=8))
    assert int(counts.sum()) == int(real.sum()) * 2


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_balanced_routing_costs_one_a_token(scope, gating):
    found = batch(gating=gating, scope=scope)
    # Token t takes experts 2t and 2t + 1: each of the 8 comes up alike in 4 or 8 tokens a row.
    experts = (2 * jnp.arange(8)[:, None] + jnp.arange(2)) % 8
    experts = jnp.broadcast_to(experts, (3, 8, 2)).astype(jnp.int32)
    real = padding(8, 4, 0)
    terms = balance_terms(found.scores, experts, real, config=found.config)
    np.testing.assert_allclose(balance_sum(terms, 2) / real.sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_one_expert_that_takes_all_costs_the_number_of_experts(scope):
    found = batch(scope=scope, top_k=1)
    scores = jnp.broadcast_to(jax.nn.one_hot(3, 8), (3, 8, 8))
    experts = jnp.full((3, 8, 1), 3, jnp.int32)
    loss = balance_loss(scores, experts, padding(), config=found.config)
    np.testing.assert_allclose(loss, 8.0, rtol=1e-6)


def test_instance_scope_is_the_formula_row_by_row():
    found = batch()
    real = np.asarray(padding())
    wanted = 0.0
    for scores, experts, mask in zip(
        *map(np.asarray, (found.scores, found.experts)), real, strict=True
    ):
        if mask.any():
            counts = np.bincount(experts[mask].ravel(), minlength=8)
            wanted += 8 / 2 * np.sum(counts * scores[mask].sum(0)) / mask.sum()
    terms = balance_terms(found.scores, found.experts, jnp.asarray(real), config=found.config)
    np.testing.assert_allclose(balance_sum(terms, 2), wanted, rtol=1e-6)


def test_microbatch_scope_is_instance_scope_of_the_rows_joined():
    found = batch(scope="microbatch")
    joined = [value.reshape(1, 24, -1) for value in (found.scores, found.experts)]
    real = padding()
    np.testing.assert_allclose(
        balance_loss(found.scores, found.experts, real, config=found.config),
        balance_loss(*joined, real.reshape(1, 24), config=RouterConfig(balance_scope="instance")),
        rtol=1e-6,
    )


@pytest.mark.parametrize("scope", SCOPES)
def test_instance_scope_alone_does_not_depend_on_how_rows_are_divided(scope):
    """Four rows in one microbatch, or in two, whose sums are added up."""
    config, _, scores, experts = batch(rows=4, scope=scope)
    sums = []
    for size in (4, 2):
        cuts = [slice(start, start + size) for start in range(0, 4, size)]
        real = padding(8, 5, 3, 8)
        terms = [balance_terms(scores[c], experts[c], real[c], config=config) for c in cuts]
        sums.append(sum(float(balance_sum(one, 2)) for one in terms))
    assert (abs(sums[0] - sums[1]) < 1e-5) == (scope == "instance")


@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_padding_and_empty_rows_reach_no_loss_and_no_gradient(poison, scope, gating):
    found = batch(gating=gating, scope=scope)
    real = padding()

    def total(scores, logits):
        terms = balance_terms(scores, found.experts, real, config=found.config)
        return balance_sum(terms, 2) + z_sum(logits, real)

    grad = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    inputs = (found.scores, found.logits)
    clean = grad(*inputs)
    dirty = grad(*(jnp.where(real[..., None], value, poison) for value in inputs))
    chex.assert_trees_all_equal(dirty, clean)
    assert np.isfinite(clean[0])
    assert all(not value[~real].any() and value[real].any() for value in dirty[1])


def test_a_batch_without_real_tokens_costs_nothing():
    found = batch()
    nothing = padding(0, 0, 0)
    assert float(balance_loss(found.scores, found.experts, nothing, config=found.config)) == 0.0
    assert float(z_loss(found.logits, nothing)) == 0.0


@pytest.mark.parametrize("part", ["balance", "z"])
def test_ten_times_the_weight_is_ten_times_its_part_of_the_gradient(part):
    x, weight = normal(3, 8, 16), normal(8, 16, seed=1)

    @jax.jit
    def gradient(scale):
        weights = {"balance": 0.005, "z": 2e-4}
        weights[part] *= scale

        def auxiliary(weight):
            config = RouterConfig()
            found = route(x, weight, bias=None, score_bias=None, config=config, top_k=2)
            balance = balance_loss(found.scores, found.experts, padding(), config=config)
            return weights["balance"] * balance + weights["z"] * z_loss(found.logits, padding())

        return jax.grad(auxiliary)(weight)

    none, once, tenfold = gradient(0.0), gradient(1.0), gradient(10.0)
    assert float(jnp.abs(once - none).max()) > 1e-4
    np.testing.assert_allclose(tenfold - none, 10 * (once - none), atol=1e-8, rtol=1e-4)


@pytest.mark.parametrize(
    ("scope", "shared_axes"), [("instance", ("sequence",)), ("global", ("data", "sequence"))]
)
def test_ranks_that_share_counts_find_the_whole_batch_s_loss(scope, shared_axes):
    found = batch(rows=4, scope=scope)
    real = padding(8, 5, 0, 3)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"))
    everywhere = ("data", "sequence")

    def local(scores, experts, real):
        def share(scores):
            terms = balance_terms(scores, experts, real, config=found.config)
            counts, tokens = lax.psum((terms.counts, terms.tokens), shared_axes)
            return balance_sum(terms._replace(counts=counts, tokens=tokens), 2)

        value, grad = jax.value_and_grad(share)(scores)
        return lax.psum(value, everywhere), grad

    tokens = PartitionSpec(*everywhere)
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=tokens, out_specs=(PartitionSpec(), tokens), check_vma=True
    )
    value, grad = jax.jit(sharded)(found.scores, found.experts, real)

    def whole(scores):
        return balance_sum(balance_terms(scores, found.experts, real, config=found.config), 2)

    wanted, wanted_grad = jax.jit(jax.value_and_grad(whole))(found.scores)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted_grad, rtol=1e-6)


jitted_update = jax.jit(bias_update, static_argnames="gamma")


def exact_update(counts, gamma):
    total, num_experts = sum(counts), len(counts)
    return [gamma * ((total > num_experts * c) - (total < num_experts * c)) for c in counts]


@pytest.mark.parametrize(
    "counts",
    [
        [5, 5, 5, 5],
        [4, 5, 6, 5],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [7, 7, 7, 6],
        # FP32 cannot tell these neighbours apart; int32 cannot hold their sum, nor four times one.
        [2**30, 2**30 + 1, 2**30 - 1, 2**30],
        [2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 2],
        [2**30, 0, 0, 0],
    ],
)
def test_bias_moves_by_gamma_towards_the_unused_and_not_at_the_exact_mean(counts):
    found = jitted_update(jnp.zeros(4), jnp.array(counts, jnp.int32), 1e-3)
    np.testing.assert_array_equal(found, np.float32(exact_update(counts, 1e-3)))


def test_bias_of_stacked_layers_is_updated_layer_by_layer():
    counts = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 6)), jnp.int32)
    bias = normal(3, 6)
    found = jitted_update(bias, counts, 0.1)
    for layer in range(3):
        np.testing.assert_array_equal(found[layer], jitted_update(bias[layer], counts[layer], 0.1))


def test_bias_does_not_stall_where_bfloat16_does():
    bias = jnp.full(2, 0.5)
    moved = jitted_update(bias, jnp.array([0, 2], jnp.int32), 1e-4)
    np.testing.assert_allclose(moved - bias, [1e-4, -1e-4], rtol=1e-3)
