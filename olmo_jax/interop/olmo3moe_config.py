"""The config.json of Olmo3MoeForCausalLM as a typed record, and what it means here.

Source: olmo_core 3.0.0, nn/moe/v2/hf: names, defaults and arithmetic of the class.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from olmo_jax.config.messages import show, together
from olmo_jax.config.records import (
    Config,
    Count,
    InitConfig,
    Layers,
    ModelConfig,
    Natural,
    Positive,
    RopeConfig,
    RouterConfig,
    SmallCount,
    SmallNatural,
    WindowConfig,
)
from olmo_jax.errors import UserError
from olmo_jax.interop.rotary import FULL, SLIDING, rope_of, rope_parameters
from olmo_jax.interop.windows import pattern_of, windows_of
from olmo_jax.rules import model as model_rules

ARCHITECTURE, MODEL_TYPE = "Olmo3MoeForCausalLM", "olmo3moe"


class Fields(BaseModel):
    """The fields that say what the model computes, with the class's own defaults."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: Count = 50304
    hidden_size: Count = 4096
    attention_hidden_size: Count | None = 4096
    head_dim: SmallCount | None = None
    dense_mlp_intermediate_size: Natural | None = 11008
    moe_intermediate_size: Natural = 2048
    shared_expert_intermediate_size: Count | None = 2048
    n_routed_experts: SmallNatural = 64
    num_experts_per_tok: SmallNatural = 4
    original_num_experts_per_tok: SmallCount | None = None
    num_hidden_layers: Layers = 32
    num_attention_heads: SmallCount = 32
    num_key_value_heads: SmallCount | None = None
    gating_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_expert_weights: Positive | None = 1.0
    restore_weight_scale: bool = True
    global_load_balancing: bool = False
    initializer_range: Positive = 0.02
    tie_word_embeddings: bool = False
    rope_theta: float | None = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_rope: bool = True
    attention_bias: bool = False
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = 4096
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    use_head_qk_norm: bool = False
    qk_norm_per_head_gains: bool = False
    scalable_softmax: bool = False
    attention_gate_type: Literal["headwise", "elementwise"] | None = None
    attention_gate_full_precision: bool = True
    dense_layers_indices: list[int] | None = None
    embed_scale: Positive = 1.0
    embed_norm: bool = False
    use_peri_ln: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    torch_dtype: Literal["float32", "bfloat16"] | None = None


_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "latent_moe_dim": None,
    "emo_min_document_expert_pool": None,
    "emo_max_document_expert_pool": None,
    "emo_eval_document_expert_pool": None,
    "emo_eos_token_id": None,
}
"""Fields of which only one value can be represented here."""

_INERT = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward"),
        *("dense_layers_use_shared_expert", "eos_token_id", "id2label", "is_encoder_decoder"),
        *(
            "label2id",
            "latent_moe_bias",
            "latent_moe_up_proj_input_norm",
            "linear_allow_neg_eigval",
        ),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_norm_eps"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
        *("max_position_embeddings", "model_type", "output_attentions", "output_hidden_states"),
        *("pad_token_id", "problem_type", "return_dict", "tokenizer_class"),
        *("transformers_version", "use_cache"),
    }
)
"""Fields that change no number of a model without linear-attention and latent layers."""


def _architecture(fields: Mapping[str, Any]) -> Iterator[str]:
    names, kind = fields.get("architectures") or [ARCHITECTURE], fields.get("model_type")
    if kind != MODEL_TYPE or names != [ARCHITECTURE]:
        yield (
            f"model_type={kind} with architectures={show(names)} is not an architecture that "
            f"olmo_jax reads; it reads model_type={MODEL_TYPE}, architectures=[{ARCHITECTURE}]"
        )


def _foreign(fields: Mapping[str, Any]) -> Iterator[str]:
    """A field that nobody here knows may change the model, unless it asks for nothing."""
    for name, value in fields.items():
        if name in _FIXED:
            if value != _FIXED[name]:
                yield (
                    f"{name}={show(value)} is not supported: olmo_jax has no such layer or rule; "
                    f"it reads only {name}={show(_FIXED[name])}"
                )
        elif value and name not in _INERT and name not in Fields.model_fields:
            yield (
                f"{name}={show(value)} is not a field of {ARCHITECTURE} that olmo_jax knows, and "
                "may change the model; remove it from config.json if it changes nothing"
            )


def _fault(name: str, error: ErrorDetails) -> str:
    text = error["msg"]
    return f"{name}={show(error['input'])} is not supported: {text[0].lower()}{text[1:]}"


def _unheld(error: ErrorDetails) -> str:
    key, text = ".".join(map(str, error["loc"])), error["msg"]
    return (
        f"the fields of config.json make model.{key}={show(error['input'])}, which is not "
        f"supported: {text[0].lower()}{text[1:]}"
    )


def _typed(fields: Mapping[str, Any]) -> Fields:
    try:
        return Fields.model_validate(dict(fields))
    except ValidationError as error:
        found = {".".join(map(str, e["loc"][:2])): e for e in error.errors(include_url=False)}
        raise UserError(together([_fault(name, e) for name, e in found.items()])) from None


def _layer_types(fields: Fields) -> list[str]:
    """Return the attention of each layer; the class alternates where none is listed."""
    num = fields.num_hidden_layers
    types = list(fields.layer_types or [(SLIDING, FULL)[i % 2] for i in range(num)])
    if len(types) != num:
        raise UserError(
            f"layer_types lists {len(types)} layers, but num_hidden_layers={num}; list {num}"
        )
    return types


def _windows(fields: Fields, types: list[str]) -> WindowConfig:
    if SLIDING in types and fields.sliding_window is None:
        raise UserError(
            f"sliding_window=null, but layer_types has {SLIDING}, which needs one; "
            "write a number of positions, the position itself included"
        )
    return pattern_of([fields.sliding_window if kind == SLIDING else None for kind in types])


def _num_dense_layers(fields: Fields) -> int:
    dense = [0] if fields.dense_layers_indices is None else fields.dense_layers_indices
    if sorted(dense) != list(range(len(dense))):
        raise UserError(
            f"dense_layers_indices={dense} are not the first {len(dense)} layers, and olmo_jax has "
            f"dense layers at the start only; it reads {list(range(len(dense)))}"
        )
    return len(dense)


def _rope(fields: Fields, types: list[str]) -> RopeConfig:
    if fields.use_rope:
        parameters = fields.rope_parameters or fields.rope_scaling
        return rope_of(parameters, fields.rope_theta, types, _head_dim(fields))
    if SLIDING in types:
        raise UserError(
            f"use_rope=false with {SLIDING} layers is not supported: olmo_jax always rotates them; "
            f"it reads use_rope=false only with {FULL} in every layer"
        )
    return RopeConfig(on_full_attention=False)


def _head_dim(fields: Fields) -> int:
    width = fields.attention_hidden_size or fields.hidden_size
    return fields.head_dim or width // fields.num_attention_heads


def _attention(fields: Fields) -> dict[str, Any]:
    if fields.attention_bias and fields.attention_gate_type:
        raise UserError(
            f"attention_bias=true with attention_gate_type={fields.attention_gate_type} is not "
            "supported: olmo_jax has no bias in the gate; it reads one of the two"
        )
    types = _layer_types(fields)
    norm = "head_gains" if fields.qk_norm_per_head_gains else "head"
    return {
        "num_heads": fields.num_attention_heads,
        "num_kv_heads": fields.num_key_value_heads or fields.num_attention_heads,
        "head_dim": _head_dim(fields),
        "qk_norm": norm if fields.use_head_qk_norm else "full",
        "attention_bias": fields.attention_bias,
        "attention_gate": fields.attention_gate_type or "none",
        "attention_gate_full_precision": fields.attention_gate_full_precision,
        "scalable_softmax": fields.scalable_softmax,
        "rope": _rope(fields, types),
        "windows": _windows(fields, types),
    }


def _router(fields: Fields) -> RouterConfig:
    return RouterConfig(
        gating=fields.gating_function,
        normalize=fields.normalize_expert_weights,
        restore_weight_scale=fields.restore_weight_scale,
        original_top_k=fields.original_num_experts_per_tok,
        balance_scope="global" if fields.global_load_balancing else "instance",
    )


def _embedding_scale(fields: Fields) -> float | Literal["sqrt_d_model"] | None:
    if fields.embed_scale == math.sqrt(fields.hidden_size):
        return "sqrt_d_model"
    return None if fields.embed_scale == 1 else fields.embed_scale


def _model(fields: Fields) -> ModelConfig:
    return ModelConfig(
        num_layers=fields.num_hidden_layers,
        num_dense_layers=_num_dense_layers(fields),
        d_model=fields.hidden_size,
        num_experts=fields.n_routed_experts,
        top_k=fields.num_experts_per_tok,
        expert_hidden=fields.moe_intermediate_size,
        shared_hidden=fields.shared_expert_intermediate_size or 0,
        dense_hidden=fields.dense_mlp_intermediate_size or 0,
        vocab_size=fields.vocab_size,
        dtype=fields.dtype or fields.torch_dtype or "float32",
        norm="peri" if fields.use_peri_ln else "reordered",
        norm_eps=fields.rms_norm_eps,
        embedding_norm=fields.embed_norm,
        embedding_scale=_embedding_scale(fields),
        tie_embeddings=fields.tie_word_embeddings,
        init=InitConfig(std=fields.initializer_range),
        router=_router(fields),
        **_attention(fields),
    )


_MODEL_RULES = (
    model_rules.dense_layers,
    model_rules.routed_layers,
    model_rules.heads_divide,
    model_rules.rotated_dims,
    model_rules.rope_scaling,
)


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the config that computes what Olmo3MoeForCausalLM does with these fields.

    Raises: UserError that names each field that has no counterpart here.
    """
    if found := [*_architecture(fields)] or [*_foreign(fields)]:
        raise UserError(together(found))
    try:
        model = _model(_typed(fields))
    except ValidationError as error:
        # What follows from several fields, such as the width of a head.
        raise UserError(together([_unheld(each) for each in error.errors()])) from None
    if found := [fault for rule in _MODEL_RULES for fault in rule(Config(model=model))]:
        raise UserError(together(found))
    return model


def _attention_fields(model: ModelConfig) -> dict[str, Any]:
    windows = windows_of(model)
    parameters = rope_parameters(model)
    gate = model.attention_gate
    return {
        "attention_hidden_size": model.num_heads * model.head_dim,
        "head_dim": model.head_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "attention_bias": model.attention_bias,
        "attention_dropout": 0.0,
        "use_head_qk_norm": model.qk_norm != "full",
        "qk_norm_per_head_gains": model.qk_norm == "head_gains",
        "scalable_softmax": model.scalable_softmax,
        "attention_gate_type": None if gate == "none" else gate,
        "attention_gate_full_precision": model.attention_gate_full_precision,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window), None),
        "use_rope": model.rope.on_full_attention or None not in windows,
        "rope_parameters": parameters,
        "rope_theta": parameters.get("rope_theta", model.rope.theta),
    }


def _feed_forward_fields(model: ModelConfig) -> dict[str, Any]:
    router = model.router
    return {
        "hidden_act": "silu",
        "dense_layers_indices": list(range(model.num_dense_layers)),
        "dense_layers_use_shared_expert": True,
        "dense_mlp_intermediate_size": model.dense_hidden,
        "moe_intermediate_size": model.expert_hidden,
        "shared_expert_intermediate_size": model.shared_hidden or None,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "original_num_experts_per_tok": router.original_top_k,
        "gating_function": router.gating,
        "normalize_expert_weights": router.normalize,
        "restore_weight_scale": router.restore_weight_scale,
        "global_load_balancing": router.balance_scope == "global",
    }


def config_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json for `model`, which `inexpressible` found no fault with.

    A model has no longest sequence here: `max_position_embeddings` is -1, as the source writes it.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "use_peri_ln": model.norm == "peri",
        "embed_scale": model.embedding_multiplier,
        "embed_norm": model.embedding_norm,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init.std,
        "max_position_embeddings": -1,
        "use_cache": not model.scalable_softmax,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_attention_fields(model),
        **_feed_forward_fields(model),
    }
