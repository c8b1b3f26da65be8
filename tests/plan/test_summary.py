"""What `olmo-jax check` says of a valid config."""

import time

import pytest

from olmo_jax.config.records import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SourceConfig,
    WindowConfig,
)
from olmo_jax.plan.parameters import parameter_shapes
from olmo_jax.plan.summary import summary, warnings


def test_a_glob_that_matches_no_parameter_is_named_with_a_name_that_exists():
    [text] = warnings(Config(optim=OptimConfig(no_decay=("embedding.*", "*nrom*"))))
    assert "'*nrom*'" in text
    assert any(repr(name) in text for name in parameter_shapes(ModelConfig()))


def test_the_default_globs_are_for_all_models_and_warn_for_none():
    assert warnings(Config()) == []


SOURCES = DataConfig(sources=(SourceConfig(path="tokens"),))


def most(key: str) -> int:
    """Return the largest value that a key of the model may have."""
    return next(rule.le for rule in ModelConfig.model_fields[key].metadata if hasattr(rule, "le"))


SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k")
SIZES += ("expert_hidden", "shared_hidden", "dense_hidden", "vocab_size")
DEEP = {"num_layers": most("num_layers")}
LARGE = {
    "layers": DEEP | {"windows": WindowConfig(pattern=(4, 4, 4, -1))},
    "a long pattern": DEEP | {"windows": WindowConfig(pattern=tuple(range(1, 500)))},
    "dense layers": DEEP | {"num_dense_layers": most("num_layers") - 1},
    "sizes": {key: most(key) for key in SIZES},
}


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_models_are_described_at_once(name):
    start = time.process_time()
    assert "FLOPs" in summary(Config(model=ModelConfig(**LARGE[name]), data=SOURCES))
    # A tenth of a second without the type checks of a test run.
    assert time.process_time() - start < 4
