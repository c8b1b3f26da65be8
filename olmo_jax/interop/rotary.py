"""Rotary positions of Olmo3MoeForCausalLM: one rule for all layers, or one for each layer type."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from olmo_jax.config.messages import listing
from olmo_jax.config.records import ModelConfig, RopeConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.windows import windows_of
from olmo_jax.model.rope import attention_factor

FULL, SLIDING = "full_attention", "sliding_attention"

_SCALINGS = {"default": "none", "linear": "pi", "llama3": "stepwise", "yarn": "yarn"}

_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    },
}
"""Hugging Face's keys of each rule, and the keys of model.rope that mean the same."""

_OPTIONAL = {"beta_fast": 32.0, "beta_slow": 1.0}


def yarn_agrees(rope: RopeConfig, head_dim: int) -> bool:
    """Say whether transformers' YaRN has the same frequencies: its ramp may end later.

    Source: transformers 5, modeling_rope_utils.py, clamps the end of the ramp to the last dim;
    olmo_core 3.0.0, nn/rope.py, to the last pair of dims.
    """
    turns = math.log(rope.original_length / (2 * math.pi * rope.beta_slow))
    end = math.ceil(head_dim * turns / (2 * math.log(rope.theta)))
    return 0 <= end <= head_dim // 2 - 1


def _given(parameters: Mapping[str, Any], kind: str, key: str) -> Any:
    value = parameters.get(key)
    if value is None:
        value = _OPTIONAL.get(key)
    if value is None:
        raise UserError(
            f"rope_parameters of rope_type={kind} lack {key}, which the rule needs; "
            f"add {key} to rope_parameters"
        )
    return value


def _refuse_what_differs(parameters: Mapping[str, Any], kind: str, known: Collection[str]) -> None:
    """Only values that leave the rule as it is here may stand beside the mapped keys."""
    neutral: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (None, 1.0)}
    if kind == "yarn":
        neutral |= {"truncate": (None, True), "mscale": (None,), "mscale_all_dim": (None,)}
    for key, value in parameters.items():
        if key in known or value in neutral.get(key, (None,)):
            continue
        allowed = [v for v in neutral.get(key, ()) if v is not None]
        advice = f"it reads {key}={listing(allowed)}" if allowed else f"remove {key}"
        raise UserError(
            f"rope_parameters has {key}={value!r}, which olmo_jax does not have for "
            f"rope_type={kind}; {advice}"
        )


def _config(kind: str, values: Mapping[str, Any]) -> RopeConfig:
    try:
        return RopeConfig.model_validate({"scaling": _SCALINGS[kind], **values})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        names = {"theta": "rope_theta"} | {ours: theirs for theirs, ours in _KEYS[kind].items()}
        raise UserError(
            f"rope_parameters has {names[str(fault['loc'][0])]}={fault['input']!r} for "
            f"rope_type={kind}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
        ) from None


def _rule(parameters: Mapping[str, Any], theta: float | None, head_dim: int) -> RopeConfig:
    """Return the rule of one `rope_parameters` dict, as if it held for all layers."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in list(_SCALINGS):
        raise UserError(
            f"rope_parameters has rope_type={kind!r}, which olmo_jax does not have; "
            f"it reads {listing(list(_SCALINGS))}"
        )
    keys = _KEYS[kind]
    extra = ("attention_factor",) if kind == "yarn" else ()
    _refuse_what_differs(parameters, kind, {"rope_type", "type", "rope_theta", *keys, *extra})
    given = parameters.get("rope_theta")
    values = {ours: _given(parameters, kind, theirs) for theirs, ours in keys.items()}
    values["theta"] = theta if given is None else given
    rope = _config(kind, values)
    if kind == "yarn":
        _check_yarn(rope, parameters.get("attention_factor"), head_dim)
    return rope


def _check_yarn(rope: RopeConfig, given: Any, head_dim: int) -> None:
    expected = attention_factor(rope, scaled=True)
    is_number = isinstance(given, int | float)
    if given is not None and not (is_number and math.isclose(given, expected, rel_tol=1e-9)):
        raise UserError(
            f"rope_parameters has attention_factor={given!r}, but olmo_jax has "
            f"0.1 ln(factor) + 1 = {expected!r} for factor={rope.factor!r}; it reads only that"
        )
    if not yarn_agrees(rope, head_dim):
        raise UserError(
            f"rope_type=yarn with original_max_position_embeddings={rope.original_length} blends "
            f"past the last pair of head_dim={head_dim}, where transformers and olmo_jax differ; "
            "it reads only a ramp that ends inside the head"
        )


def rope_of(
    parameters: Mapping[str, Any] | None,
    theta: float | None,
    layer_types: Collection[str],
    head_dim: int,
) -> RopeConfig:
    """Return the config of `rope_parameters`; `theta` is the base where they name none.

    Raises: UserError where this project has no such rule.
    """
    flat, types = dict(parameters or {}), set(layer_types)
    if not flat or not set(flat) <= types:
        rope = _rule(flat, theta, head_dim)
        everywhere = rope.scaling != "none" and SLIDING in types
        return rope.model_copy(update={"scaled_layers": "all"}) if everywhere else rope
    if lacking := sorted(types - set(flat)):
        raise UserError(
            f"rope_parameters has rules for {listing(sorted(flat), 'and')}, but layer_types also "
            f"has {listing(lacking, 'and')}; add rope_parameters for {listing(lacking, 'and')}"
        )
    if wrong := [kind for kind in sorted(types) if not isinstance(flat[kind], dict)]:
        raise UserError(
            f"rope_parameters has {wrong[0]}={flat[wrong[0]]!r}, but olmo_jax needs a rule for "
            "each layer type; write a mapping with rope_type and rope_theta"
        )
    rules = {kind: _rule(flat[kind], theta, head_dim) for kind in types}
    return _combined(rules.get(FULL), rules.get(SLIDING))


def _combined(full: RopeConfig | None, sliding: RopeConfig | None) -> RopeConfig:
    if sliding is None and full is not None:
        return full
    if sliding is not None and full in (None, sliding):
        everywhere = {"scaled_layers": "all"} if sliding.scaling != "none" else {}
        return sliding.model_copy(update=everywhere)
    assert full is not None
    assert sliding is not None
    if sliding.scaling == "none" and full.theta == sliding.theta:
        return full
    if sliding.scaling == full.scaling == "none":
        return sliding.model_copy(update={"scaling": "abf", "scaled_theta": full.theta})
    raise UserError(
        f"rope_parameters has {FULL} with theta {full.theta:g} and scaling {full.scaling}, "
        f"{SLIDING} with theta {sliding.theta:g} and scaling {sliding.scaling}; olmo_jax reads "
        f"the same rule for both, or {SLIDING} without scaling and one theta, or two thetas "
        "without scaling"
    )


def _scaled(rope: RopeConfig) -> dict[str, Any]:
    if rope.scaling == "abf":
        return {"rope_type": "default", "rope_theta": rope.scaled_theta}
    kind = next(theirs for theirs, ours in _SCALINGS.items() if ours == rope.scaling)
    values = {theirs: getattr(rope, ours) for theirs, ours in _KEYS[kind].items()}
    if kind == "yarn":
        values["attention_factor"] = attention_factor(rope, scaled=True)
    return {"rope_type": kind, "rope_theta": rope.theta, **values}


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` for `model`: by layer type only where the types differ."""
    rope = model.rope
    plain, scaled = {"rope_type": "default", "rope_theta": rope.theta}, _scaled(rope)
    rules = {FULL: scaled, SLIDING: scaled if rope.scaled_layers == "all" else plain}
    types = {FULL if window is None else SLIDING for window in windows_of(model)}
    if len(types) == 1:
        return rules[types.pop()]
    return scaled if rules[SLIDING] == scaled else rules
