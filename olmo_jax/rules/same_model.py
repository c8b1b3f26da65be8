"""Whether two models compute the same: what differs between them, from their configs alone."""

from typing import Any

from olmo_jax.arch.layers import window_of
from olmo_jax.config.records import Config, ModelConfig
from olmo_jax.rules.effects import IDLE, value_of
from olmo_jax.rules.resume_policy import Change, compared_keys

_TRAINS_ONLY = (
    "model.dtype",
    "model.init.",
    "model.router.jitter_eps",
    "model.router.balance_weight",
    "model.router.balance_scope",
    "model.router.z_weight",
    # Both give the router a bias. A checkpoint has it as a leaf or has not, which is compared too.
    "model.router.bias_gamma",
    "model.router.score_correction_bias",
)
"""Keys and sections that decide how a model is trained or rounded, and not what it is."""

_WINDOWS = "model.windows"


def computed_differently(before: ModelConfig, now: ModelConfig) -> list[Change]:
    """Return the keys that make `now` compute something else than `before` with equal weights.

    A key that has no effect in a model counts as its default, and windows count layer by layer.
    """
    there, here = _what_counts(before), _what_counts(now)
    old, new = Config(model=before), Config(model=now)
    return [
        Change(key, value_of(old, key), value_of(new, key))
        for key in there
        if there[key] != here[key]
    ]


def _what_counts(model: ModelConfig) -> dict[str, Any]:
    config, default = Config(model=model), Config()
    idle = {
        key
        for one in IDLE
        if one.keys[0].startswith("model.") and one.when(config)
        for key in one.keys
    }
    counted = [
        key
        for key in compared_keys()
        if key.startswith("model.") and not key.startswith((*_TRAINS_ONLY, f"{_WINDOWS}."))
    ]
    values = {key: value_of(default if key in idle else config, key) for key in counted}
    return values | {
        "model.embedding_scale": model.embedding_multiplier,
        _WINDOWS: [window_of(model, layer) for layer in range(model.num_layers)],
    }
