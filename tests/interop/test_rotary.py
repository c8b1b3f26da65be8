"""Rope parameters of each kind become our rule with the same frequencies, and come back."""

import math

import pytest

from olmo_jax.config.records import RopeConfig, WindowConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.rotary import FULL, SLIDING, rope_of, rope_parameters
from tests.interop.small import small

HEAD_DIM = 16
BOTH = [SLIDING, FULL]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}


def _rope(parameters, types=BOTH, theta=10_000.0):
    return rope_of(parameters, theta, types, HEAD_DIM)


def test_without_parameters_the_old_top_level_theta_holds():
    assert _rope(None) == RopeConfig(theta=10_000.0)
    assert _rope({"rope_type": "default", "rope_theta": 7e5}) == RopeConfig(theta=7e5)


def test_one_rule_for_all_layers_scales_the_sliding_ones_too():
    rule = {"type": "linear", "factor": 2.0}
    assert _rope(rule) == RopeConfig(theta=1e4, scaling="pi", factor=2.0, scaled_layers="all")
    assert _rope(rule, [FULL]) == RopeConfig(theta=1e4, scaling="pi", factor=2.0)


def test_llama3_is_the_stepwise_rule():
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = _rope({**rule, "original_max_position_embeddings": 128}, [FULL])
    assert rope == RopeConfig(theta=1e4, scaling="stepwise", factor=8.0, original_length=128)


def test_two_bases_without_scaling_are_abf():
    rope = _rope({FULL: {"rope_theta": 5e3}, SLIDING: {"rope_theta": 100.0}})
    assert rope == RopeConfig(theta=100.0, scaling="abf", scaled_theta=5e3)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=100.0),
        RopeConfig(theta=100.0, scaling="abf", scaled_theta=5e3),
        RopeConfig(theta=100.0, scaling="pi", factor=3.0),
        RopeConfig(theta=100.0, scaling="pi", factor=3.0, scaled_layers="all"),
        RopeConfig(theta=1e4, scaling="stepwise", factor=3.0, original_length=99),
        RopeConfig(theta=100.0, scaling="yarn", factor=4.0, original_length=64, beta_fast=16.0),
        RopeConfig(theta=100.0, scaling="yarn", original_length=64, scaled_layers="all"),
    ],
)
def test_what_is_written_is_read_back(rope):
    model = small(rope=rope, head_dim=HEAD_DIM)
    assert _rope(rope_parameters(model)) == rope


def test_layer_types_appear_only_where_they_differ():
    assert set(rope_parameters(small())) == {"rope_type", "rope_theta"}
    scaled = small(rope=RopeConfig(scaling="pi"))
    assert set(rope_parameters(scaled)) == {FULL, SLIDING}
    without_windows = scaled.model_copy(update={"windows": WindowConfig()})
    assert rope_parameters(without_windows)["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "dynamic"}, ["rope_type='dynamic'", "default, linear, llama3 or yarn"]),
        ({"rope_type": "linear"}, ["rope_type=linear lack factor", "add factor"]),
        ({"rope_type": "linear", "factor": "2"}, ["factor='2'", "valid number"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "=1.0"]),
        ({"sections": [1, 2]}, ["sections=[1, 2]", "remove sections"]),
        ({"rope_theta": 0.5}, ["rope_theta=0.5", "greater than 1"]),
        ({**YARN, "truncate": False}, ["truncate=False", "truncate=True"]),
        ({**YARN, "mscale": 0.7}, ["mscale=0.7", "remove mscale"]),
        ({**YARN, "attention_factor": 1.5}, ["attention_factor=1.5", f"{0.1 * math.log(4) + 1}"]),
        ({**YARN, "original_max_position_embeddings": 4096}, ["4096", "head_dim=16"]),
        ({FULL: {"rope_theta": 5e3}, SLIDING: None}, ["sliding_attention=None", "a mapping"]),
        ({FULL: {"rope_theta": 5e3}}, ["sliding_attention", "add rope_parameters"]),
        (
            {FULL: {"rope_theta": 5e3}, SLIDING: {"rope_type": "linear", "factor": 2.0}},
            ["theta 5000 and scaling none", "scaling pi", "the same rule"],
        ),
    ],
)
def test_a_rule_that_does_not_exist_here_is_refused(parameters, words):
    with pytest.raises(UserError) as caught:
        _rope(parameters)
    assert [word for word in words if word not in str(caught.value)] == []
