"""What `olmo-jax check` says of a valid config."""

from olmo_jax.config.records import Config, ModelConfig, OptimConfig
from olmo_jax.plan.parameters import parameter_shapes
from olmo_jax.plan.summary import warnings


def test_a_glob_that_matches_no_parameter_is_named_with_a_name_that_exists():
    [text] = warnings(Config(optim=OptimConfig(no_decay=("embedding.*", "*nrom*"))))
    assert "'*nrom*'" in text
    assert any(repr(name) in text for name in parameter_shapes(ModelConfig()))


def test_the_default_globs_are_for_all_models_and_warn_for_none():
    assert warnings(Config()) == []
