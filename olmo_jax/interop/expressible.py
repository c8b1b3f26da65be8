"""Which configs Olmo3MoeForCausalLM can compute: the rest is refused before anything is written."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from olmo_jax.config.messages import listing, show, together
from olmo_jax.config.records import ModelConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.olmo3moe_config import ARCHITECTURE, config_fields, model_config
from olmo_jax.interop.rotary import FULL, rope_parameters, yarn_agrees
from olmo_jax.interop.windows import windows_of

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "norm": ("reordered", "peri"),
    "qk_norm": ("head", "head_gains", "full"),
    "clip_qkv": (None,),
    "rope.partial": (1.0,),
    "rope.full_precision": (True,),
}

_ALLOWED_IN_ROUTER: dict[str, tuple[Any, ...]] = {
    "router.gating": ("softmax", "sigmoid"),
    "router.assignment": ("learned",),
    "router.bias": (False,),
    "router.expert_weight_scale": (None,),
    "router.num_groups": (None,),
    "router.bias_gamma": (None,),
    "router.score_correction_bias": (False,),
}


def _single_keys(model: ModelConfig) -> Iterator[str]:
    allowed = _ALLOWED | (_ALLOWED_IN_ROUTER if model.num_routed_layers else {})
    for key, values in allowed.items():
        value = reduce(getattr, key.split("."), model)
        if value not in values:
            yield (
                f"model.{key}={show(value)} cannot be written as {ARCHITECTURE}, which has no such "
                f"thing; it holds models with model.{key}={listing([show(v) for v in values])}"
            )


def _sigmoid(model: ModelConfig) -> Iterator[str]:
    router = model.router
    if model.num_routed_layers and router.gating == "sigmoid" and router.sigmoid_epsilon != 1e-7:
        yield (
            f"model.router.sigmoid_epsilon={show(router.sigmoid_epsilon)} cannot be written as "
            f"{ARCHITECTURE}, which adds 1e-7 to a score; it holds models with "
            "model.router.sigmoid_epsilon=1e-7"
        )


def _gate_bias(model: ModelConfig) -> Iterator[str]:
    if model.attention_bias and model.attention_gate != "none":
        yield (
            f"model.attention_gate={model.attention_gate} with model.attention_bias=true cannot be "
            f"written as {ARCHITECTURE}, whose gate then has a bias too; it holds models with "
            "model.attention_gate=none or model.attention_bias=false"
        )


def _one_window(model: ModelConfig) -> Iterator[str]:
    sizes = sorted({window for window in windows_of(model) if window is not None})
    if len(sizes) > 1:
        yield (
            f"model.windows.pattern={show(model.windows.pattern)} cannot be written as "
            f"{ARCHITECTURE}, whose sliding layers share one window, not {listing(sizes, 'and')}; "
            "it holds models with one number besides -1 in model.windows.pattern"
        )


def _rotation(model: ModelConfig) -> Iterator[str]:
    windows, rope = windows_of(model), model.rope
    if not rope.on_full_attention and None in windows and any(windows):
        yield (
            f"model.rope.on_full_attention=false beside sliding layers cannot be written as "
            f"{ARCHITECTURE}, which rotates all layers or none; it holds models with "
            "model.rope.on_full_attention=true, or without sliding layers"
        )
    elif FULL in rope_parameters(model):
        yield (
            f"model.rope.scaling={rope.scaling} with model.rope.scaled_layers=full beside sliding "
            f"layers cannot be written as {ARCHITECTURE}: from_pretrained leaves the frequencies "
            "of a layer type uninitialised where the types have rules of their own; it holds "
            "models with model.rope.scaled_layers=all, or without sliding layers"
        )
    if rope.scaling == "yarn" and not yarn_agrees(rope, model.head_dim):
        yield (
            f"model.rope.scaling=yarn with model.rope.original_length={rope.original_length} "
            f"cannot be written as {ARCHITECTURE}: transformers ends the blend past the last pair "
            f"of model.head_dim={model.head_dim}; it holds models whose blend ends inside the head"
        )


_RULES: tuple[Callable[[ModelConfig], Iterator[str]], ...] = (
    _single_keys,
    _sigmoid,
    _gate_bias,
    _one_window,
    _rotation,
)


def exchanged(model: ModelConfig) -> ModelConfig:
    """Return the config that a model's export is read back as, itself where there is no export.

    Some models have several configs, such as one base of rotary positions for all layers.
    """
    router = model.router.model_copy(update={"bias_gamma": None, "score_correction_bias": False})
    without_bias = model.model_copy(update={"router": router})
    if any(fault for rule in _RULES for fault in rule(without_bias)):
        return model
    return model_config(config_fields(without_bias))


def check_expressible(model: ModelConfig) -> None:
    """Refuse a model that the class would compute otherwise; what only trains it does not count.

    Raises: UserError that lists every key in the way.
    """
    if found := [fault for rule in _RULES for fault in rule(model)]:
        raise UserError(together(found))
