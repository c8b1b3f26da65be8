"""Which keys of a model change what it computes."""

from functools import reduce
from operator import getitem
from typing import Any

import pytest

from olmo_jax.config.records import Config, ModelConfig
from olmo_jax.rules import resume_policy
from olmo_jax.rules.same_model import computed_differently

BEFORE = ModelConfig()


def model(**changed: Any) -> ModelConfig:
    """Return the default model with some keys changed."""
    tree = BEFORE.model_dump(mode="json")
    for name, change in changed.items():
        tree[name] = {**tree[name], **change} if isinstance(change, dict) else change
    return ModelConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rope": {"theta": 10.0}}, "model.rope.theta 500000.0 -> 10.0"),
        ({"rope": {"on_full_attention": False}}, "model.rope.on_full_attention true -> false"),
        ({"rope": {"scaling": "pi"}}, "model.rope.scaling none -> pi"),
        ({"top_k": 1}, "model.top_k 2 -> 1"),
        ({"router": {"normalize": None}}, "model.router.normalize 1.0 -> null"),
        ({"router": {"gating": "sigmoid"}}, "model.router.gating softmax -> sigmoid"),
        ({"router": {"assignment": "random"}}, "model.router.assignment learned -> random"),
        ({"router": {"restore_weight_scale": False}}, "restore_weight_scale true -> false"),
        ({"embedding_scale": None}, "model.embedding_scale sqrt_d_model -> null"),
        ({"norm_eps": 1e-5}, "model.norm_eps 1.0e-06 -> 1.0e-05"),
        ({"clip_qkv": 8.0}, "model.clip_qkv null -> 8.0"),
        ({"windows": {"pattern": [16]}}, "model.windows {pattern: []"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_the_outputs_of_equal_weights_is_named_with_both_values(
    changed: dict[str, Any], text: str
) -> None:
    (found,) = computed_differently(BEFORE, model(**changed))
    assert text in str(found)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"dtype": "float32", "init": {"std": 0.1}}),
        ({}, {"router": {"balance_weight": 0.0, "z_weight": 0.0, "jitter_eps": 0.1}}),
        ({"router": {"bias_gamma": 0.1}}, {"router": {"bias_gamma": 0.2}}),
        ({}, {"rope": {"factor": 2.0, "beta_fast": 9.0}}),
        ({}, {"router": {"sigmoid_epsilon": 1e-3, "original_top_k": 2}}),
        ({}, {"embedding_scale": 128**0.5}),
        ({"windows": {"pattern": [-1, -1]}}, {}),
        (
            {"windows": {"pattern": [8, -1], "force_full_first": False}},
            {"windows": {"pattern": [8, -1, 8, -1], "force_full_first": False}},
        ),
        ({"num_dense_layers": 4}, {"num_dense_layers": 4, "top_k": 1, "router": {"bias": True}}),
    ],
)
def test_what_only_trains_or_has_no_effect_is_the_same_model(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    assert computed_differently(model(**before), model(**now)) == []


def test_every_key_of_the_model_is_either_compared_or_named_as_one_that_only_trains() -> None:
    free = {
        *("model.dtype", "model.init.method", "model.init.std", "model.init.embedding_std"),
        *("model.router.jitter_eps", "model.router.bias_gamma"),
        *("model.router.score_correction_bias", "model.router.balance_weight"),
        *("model.router.balance_scope", "model.router.z_weight"),
    }
    # Sigmoid gating, YaRN and gates so that nearly every key is read.
    read = model(
        attention_gate="headwise",
        rope={"scaling": "yarn", "scaled_layers": "all"},
        router={"gating": "sigmoid"},
    )
    changed = {
        key: _with(read, key) for key in resume_policy.compared_keys() if key.startswith("model.")
    }
    same = {
        key for key, other in changed.items() if other and not computed_differently(read, other)
    }
    # The last three are read by other scaling rules.
    assert same - free == {
        *("model.windows.force_full_first", "model.windows.force_full_last"),
        *("model.rope.scaled_theta", "model.rope.low_frequency_factor"),
        "model.rope.high_frequency_factor",
    }


def _with(model: ModelConfig, key: str) -> ModelConfig | None:
    """Return the model with another value of a number or a switch; None for what is neither."""
    tree = model.model_dump(mode="json")
    *sections, name = key.split(".")[1:]
    place = reduce(getitem, sections, tree)
    value = place[name]
    if not isinstance(value, int | float):
        return None
    place[name] = not value if isinstance(value, bool) else type(value)(value * 2 or 1)
    if key == "model.rope.partial":
        place[name] = 0.5
    return Config.model_validate({"model": tree}).model
