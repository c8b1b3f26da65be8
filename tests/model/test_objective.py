"""The one-device oracle as a user calls it."""

import jax.numpy as jnp
import pytest

from olmo_jax.config.records import ModelConfig, RouterConfig
from olmo_jax.errors import UserError
from olmo_jax.model import apply, loss
from olmo_jax.model.transformer import initialise

MODEL = ModelConfig(
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    expert_hidden=8,
    shared_hidden=8,
    dense_hidden=16,
    vocab_size=32,
    router=RouterConfig(bias_gamma=1e-3),
)
TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)


@pytest.fixture(scope="module")
def params():
    trained, expert_bias = initialise(MODEL, 0)
    return {**trained, **expert_bias}


def test_a_leaf_by_another_name_is_named_and_not_taken_for_its_neighbour(params):
    wrong = dict(params)
    wrong["body.router.score_bias"] = wrong.pop("body.moe.router.score_bias")
    with pytest.raises(UserError, match=r"lack \['body.moe.router.score_bias'\]") as error:
        apply(MODEL, wrong, TOKENS)
    assert "'body.router.score_bias'" in str(error.value)


def test_a_segment_sees_nothing_of_the_one_before_it(params):
    segments = jnp.array([[1, 1, 1, 2, 2, 2]] * 2, jnp.int32)
    together = apply(MODEL, params, TOKENS, segments)
    alone = apply(MODEL, params, TOKENS[:, 3:])
    assert jnp.allclose(together[:, 3:], alone, atol=1e-5)


def test_ignored_labels_do_not_count(params):
    labels = jnp.roll(TOKENS, -1, axis=1)
    half = labels.at[:, 3:].set(-100)
    # Causal: the first positions' losses do not depend on what comes after them.
    expected = loss(MODEL, params, TOKENS[:, :3], labels[:, :3])
    assert loss(MODEL, params, TOKENS, half) == pytest.approx(float(expected), rel=1e-5)
    assert loss(MODEL, params, TOKENS, jnp.full_like(labels, -100)) == 0
