"""Initial weights: the table of standard deviations, and independence of how layers are stacked."""

import math

import jax
import numpy as np
import pytest

from olmo_jax.arch.layers import PADDING_LAYER
from olmo_jax.arch.parameters import Parameter
from olmo_jax.config.records import InitConfig, ModelConfig
from olmo_jax.model.initialise import Initialiser

NUM_LAYERS, WIDTH, FAN_IN, LAYER = 6, 256, 64, 3
STD = 0.01

# What a normal distribution keeps of its standard deviation when it is cut at 3 sigma.
TRUNCATED = 0.9866

DEPTH = {"llama": STD / math.sqrt(2 * NUM_LAYERS), "llama_depth": STD / math.sqrt(2 * (LAYER + 1))}
TABLE = {
    "attention_in": {"normal": STD, "llama": STD, "llama_depth": STD, "fan_in": FAN_IN**-0.5},
    "attention_out": {"normal": STD, **DEPTH, "fan_in": FAN_IN**-0.5},
    "router": {"normal": STD, **DEPTH, "fan_in": FAN_IN**-0.5},
    "routed_in": {"normal": STD, **DEPTH, "fan_in": FAN_IN**-0.5},
    "routed_out": {"normal": STD, **DEPTH, "fan_in": FAN_IN**-0.5},
    "shared": {"normal": STD, **DEPTH, "fan_in": STD},
    "head": {"normal": STD, **dict.fromkeys(("llama", "llama_depth", "fan_in"), WIDTH**-0.5)},
}


def _model(method, **fields):
    init = InitConfig(method=method, std=STD, embedding_std=fields.pop("embedding_std", None))
    return ModelConfig(num_layers=NUM_LAYERS, d_model=WIDTH, init=init, **fields)


def _sample(model, init, *, layers=LAYER, name="w", shape=(256, 256), seed=0):
    layers = np.array(layers)
    dims = ("chunks", "stages", "layers")[: layers.ndim]
    described = {f"block.{name}": Parameter(shape, ("a", "b"), init, fan_in=FAN_IN)}
    make = Initialiser(jax.random.key(seed), model, described, "block.", layers, dims)
    return np.asarray(make(name)[...])


@pytest.mark.parametrize("method", ["normal", "llama", "llama_depth", "fan_in"])
@pytest.mark.parametrize("kind", TABLE)
def test_standard_deviation_is_that_of_the_table_and_nothing_exceeds_three_sigma(kind, method):
    sigma, values = TABLE[kind][method], _sample(_model(method), kind)
    # 65,536 draws: the estimate has a relative error of 0.3 % (one sigma).
    np.testing.assert_allclose(values.std(), TRUNCATED * sigma, rtol=0.01)
    assert abs(values.mean()) < 0.02 * sigma
    assert 2.9 * sigma < np.abs(values).max() <= 3.0 * sigma * (1 + 1e-6)


@pytest.mark.parametrize(
    ("method", "fields", "sigma"),
    [
        ("normal", {}, TRUNCATED * STD),
        ("normal", {"embedding_std": 0.5}, TRUNCATED * 0.5),
        ("llama", {}, 1.0),
        ("llama_depth", {"embedding_scale": 4.0}, 1.0),
        ("fan_in", {"embedding_scale": "sqrt_d_model"}, 1 / 16),
        ("fan_in", {"embedding_scale": None}, 1.0),
    ],
)
def test_embeddings_are_cut_only_under_normal(method, fields, sigma):
    values = _sample(_model(method, **fields), "embedding", layers=0)
    np.testing.assert_allclose(values.std(), sigma, rtol=0.01)
    assert (np.abs(values).max() > 3.5 * sigma) == (method != "normal")


@pytest.mark.parametrize("method", ["normal", "llama_depth"])
def test_a_stacked_layer_has_the_values_of_the_layer_alone(method):
    model = _model(method)
    stacked = _sample(model, "routed_in", layers=(1, 3, 5), shape=(8, 16))
    staged = _sample(model, "routed_in", layers=[[[1], [3]], [[5], [PADDING_LAYER]]], shape=(8, 16))
    for slot, layer in enumerate((1, 3, 5)):
        alone = _sample(model, "routed_in", layers=layer, shape=(8, 16))
        np.testing.assert_array_equal(stacked[slot], alone)
        np.testing.assert_array_equal(staged.reshape(4, 8, 16)[slot], alone)
    assert not staged[1, 1].any()


def test_leaves_differ_by_seed_name_and_layer():
    model = _model("normal")
    variants = [{}, {"seed": 1}, {"name": "v"}, {"layers": 2}]
    values = [_sample(model, "shared", shape=(16, 16), **variant) for variant in variants]
    for i, ours in enumerate(values):
        for theirs in values[:i]:
            assert np.abs(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]) < 0.3


def test_gains_are_one_and_biases_zero():
    model = _model("normal")
    assert (_sample(model, "ones", shape=(4, 4)) == 1.0).all()
    assert (_sample(model, "zeros", shape=(4, 4)) == 0.0).all()
