"""A tiny model with every kind of layer, and values that tell its leaves apart."""

import numpy as np

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import ModelConfig, WindowConfig

SIZES = {
    "num_layers": 6,
    "num_dense_layers": 1,
    "d_model": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "num_experts": 3,
    "top_k": 2,
    "expert_hidden": 5,
    "shared_hidden": 6,
    "dense_hidden": 7,
    "vocab_size": 11,
    "dtype": "float32",
}

# One leading block, two periods of two in the body, one trailing block.
WINDOWS = WindowConfig(pattern=(4, -1), force_full_first=False, force_full_last=False)


def small(**fields) -> ModelConfig:
    return ModelConfig(**{**SIZES, "windows": WINDOWS, **fields})


def values(model, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=leaf.shape).astype(dtype) for name, leaf in parameters(model).items()
    }


def hf_fields(**changes):
    """Return a config.json that is read without complaint."""
    return {
        "architectures": ["Olmo3MoeForCausalLM"],
        "model_type": "olmo3moe",
        "vocab_size": 11,
        "hidden_size": 8,
        "attention_hidden_size": 16,
        "head_dim": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "dense_mlp_intermediate_size": 7,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "use_head_qk_norm": True,
        **changes,
    }
