"""Parameters that a config has: the published numbers, and the leaves that the model builds."""

import pytest

from olmo_jax.arch.parameters import active_parameters, total_parameters
from olmo_jax.config.records import ModelConfig, RouterConfig, WindowConfig
from olmo_jax.model.transformer import check_description


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [
        ("Tiny-64E", "1.59", "12.91"),
        ("Small-64E", "4.29", "40.86"),
        ("Medium-64E", "7.37", "70.22"),
        ("Medium-96E", "7.38", "103.75"),
        ("Medium-128E", "7.38", "137.27"),
        ("Large-128E", "15.14", "295.99"),
        ("Bench-64E", "3.17", "24.31"),
    ],
)
def test_recipes_have_the_published_number_of_parameters(recipes, name, active, total):
    model = recipes[name]
    assert f"{active_parameters(model) / 1e9:.2f}" == active
    assert f"{total_parameters(model) / 1e9:.2f}" == total


@pytest.mark.parametrize(
    ("name", "active", "total", "to"),
    [
        ("Ultra-128E", "58.36", 1200, 10),
        ("Ultra-256E", "58.41", 2380, 10),
        ("Bench-8E", "3.17", 4.6, 0.1),
        ("Bench-128E", "3.17", 46.9, 0.1),
    ],
)
def test_recipes_whose_total_is_published_in_fewer_digits(recipes, name, active, total, to):
    assert f"{active_parameters(recipes[name]) / 1e9:.2f}" == active
    assert round(total_parameters(recipes[name]) / 1e9 / to) == round(total / to)


MODELS = {
    "default": ModelConfig(),
    "all dense": ModelConfig(num_layers=2, num_dense_layers=2, num_experts=0, top_k=0),
    "all routed": ModelConfig(num_layers=2, num_dense_layers=0, shared_hidden=0, norm="pre"),
    "everything": ModelConfig(
        attention_bias=True,
        attention_gate="elementwise",
        scalable_softmax=True,
        qk_norm="full",
        norm="reordered",
        router=RouterConfig(bias=True, bias_gamma=1e-3),
    ),
    "tied": ModelConfig(
        tie_embeddings=True, embedding_norm=False, qk_norm="none", attention_gate="headwise"
    ),
    "windows": ModelConfig(
        num_layers=8, qk_norm="head_gains", windows=WindowConfig(pattern=(16, 16, -1))
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_modules_make_what_is_described(model):
    check_description(model)


def test_score_bias_is_state_and_no_parameter():
    with_bias = ModelConfig(router=RouterConfig(bias_gamma=1e-3))
    assert total_parameters(with_bias) == total_parameters(ModelConfig())


def test_a_window_pattern_moves_layers_between_groups_and_adds_nothing():
    plain = total_parameters(ModelConfig(num_layers=8))
    assert total_parameters(MODELS["windows"].model_copy(update={"qk_norm": "head"})) == plain


def test_all_experts_active_means_that_every_parameter_is():
    assert active_parameters(ModelConfig(top_k=8)) == total_parameters(ModelConfig(top_k=8))
