"""The config of Olmo3MoeForCausalLM: what changes a number is read, or refused by name."""

import math
from contextlib import suppress

import pytest

from olmo_jax.config.records import ModelConfig, RopeConfig, RouterConfig, WindowConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.olmo3moe_config import Fields, config_fields, model_config
from olmo_jax.interop.rotary import FULL, SLIDING
from tests.interop.small import hf_fields, small


def _changed(**changes):
    """Return which keys of the model a change in config.json sets, and to what."""
    before, after = model_config(hf_fields()), model_config(hf_fields(**changes))
    return {name: value for name, value in after if value != getattr(before, name)}


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"use_peri_ln": True}, {"norm": "peri"}),
        ({"rms_norm_eps": 1e-6}, {"norm_eps": 1e-6}),
        ({"embed_norm": True}, {"embedding_norm": True}),
        ({"embed_scale": math.sqrt(8)}, {"embedding_scale": "sqrt_d_model"}),
        ({"embed_scale": 3.5}, {"embedding_scale": 3.5}),
        ({"attention_gate_type": "headwise"}, {"attention_gate": "headwise"}),
        ({"attention_gate_full_precision": False}, {"attention_gate_full_precision": False}),
        ({"attention_bias": True}, {"attention_bias": True}),
        ({"qk_norm_per_head_gains": True}, {"qk_norm": "head_gains"}),
        ({"use_head_qk_norm": False}, {"qk_norm": "full"}),
        ({"scalable_softmax": True}, {"scalable_softmax": True}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"shared_expert_intermediate_size": None}, {"shared_hidden": 0}),
        ({"dense_layers_indices": [0, 1]}, {"num_dense_layers": 2}),
        ({"dense_layers_indices": []}, {"num_dense_layers": 0}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": None, "attention_hidden_size": 24}, {"head_dim": 6}),
        ({"head_dim": None, "attention_hidden_size": None}, {"head_dim": 2}),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"rope_theta": 5e5}, {"rope": RopeConfig(theta=5e5)}),
        ({"sliding_window": 3}, {"windows": WindowConfig(pattern=(3, -1), force_full_first=False)}),
        ({"gating_function": "sigmoid"}, {"router": RouterConfig(gating="sigmoid")}),
        ({"normalize_expert_weights": None}, {"router": RouterConfig(normalize=None)}),
        ({"restore_weight_scale": False}, {"router": RouterConfig(restore_weight_scale=False)}),
        ({"original_num_experts_per_tok": 3}, {"router": RouterConfig(original_top_k=3)}),
        ({"global_load_balancing": True}, {"router": RouterConfig(balance_scope="global")}),
        (
            {"use_rope": False, "layer_types": [FULL] * 4},
            {"rope": RopeConfig(on_full_attention=False), "windows": WindowConfig()},
        ),
    ],
)
def test_a_field_sets_its_key(fields, keys):
    if "windows" in keys and keys["windows"].pattern:
        keys["windows"] = keys["windows"].model_copy(update={"force_full_last": False})
    assert _changed(**fields) == keys


def test_absent_fields_have_the_defaults_of_the_class():
    model = model_config({"model_type": "olmo3moe", "use_head_qk_norm": True})
    assert (model.num_layers, model.d_model, model.num_experts, model.top_k) == (32, 4096, 64, 4)
    assert (model.norm, model.embedding_norm, model.embedding_scale) == ("reordered", False, None)
    assert model.windows.pattern == (4096, -1)
    assert (model.norm_eps, model.rope.theta, model.dtype) == (1e-5, 1e4, "float32")


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_a_layer_type_without_counterpart_is_refused(kind):
    with pytest.raises(UserError, match=rf"layer_types\.1={kind} is not supported.*full_attention"):
        model_config(hf_fields(layer_types=[FULL, kind, FULL, FULL]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, ["model_type=llama", "reads model_type=olmo3moe"]),
        ({"architectures": ["OlmoeForCausalLM"]}, ["[OlmoeForCausalLM]", "[Olmo3MoeForCausalLM]"]),
        ({"latent_moe_dim": 16}, ["latent_moe_dim=16", "only latent_moe_dim=null"]),
        ({"emo_eval_document_expert_pool": 3}, ["emo_eval_document_expert_pool=3", "=null"]),
        ({"hidden_act": "gelu"}, ["hidden_act=gelu", "only hidden_act=silu"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1", "=0.0"]),
        ({"router_bias": True}, ["router_bias=true", "not a field of Olmo3MoeForCausalLM"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config={bits: 4}", "remove it"]),
        ({"attention_gate_type": "column"}, ["attention_gate_type=column", "'headwise'"]),
        ({"gating_function": "topk_softmax"}, ["gating_function=topk_softmax", "'sigmoid'"]),
        ({"hidden_size": "8"}, ["hidden_size='8'", "valid integer"]),
        (
            {"n_routed_experts": 10**9},
            ["n_routed_experts=1000000000", "less than or equal to 65536"],
        ),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "equal to 1000"]),
        ({"head_dim": None, "attention_hidden_size": 1}, ["make model.head_dim=0", "equal to 1"]),
        ({"dtype": "float16"}, ["dtype=float16", "'bfloat16'"]),
        ({"dense_layers_indices": [0, 2]}, ["dense_layers_indices=[0, 2]", "reads [0, 1]"]),
        ({"layer_types": [FULL]}, ["layer_types lists 1", "num_hidden_layers=4", "list 4"]),
        ({"sliding_window": None}, ["sliding_window=null", SLIDING, "number of positions"]),
        ({"use_rope": False}, ["use_rope=false", SLIDING, "full_attention in every layer"]),
        (
            {"attention_bias": True, "attention_gate_type": "headwise"},
            ["attention_bias=true", "attention_gate_type=headwise", "one of the two"],
        ),
        ({"num_experts_per_tok": 4}, ["model.top_k=4 is above model.num_experts=3"]),
        ({"num_key_value_heads": 3}, ["model.num_kv_heads=3", "1, 2 or 4"]),
        ({"dense_mlp_intermediate_size": None}, ["model.dense_hidden=0"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type='longrope'"]),
    ],
)
def test_a_field_without_counterpart_is_refused_by_name(fields, words):
    with pytest.raises(UserError) as caught:
        model_config(hf_fields(**fields))
    assert [word for word in words if word not in str(caught.value)] == []


VALUES = [0, -1, 10**9, 2**31, 10**30, 1.5, 1e300, math.nan, "x", None, True, [], [1], {}]
VALUES += [{"rope_type": "llama3", "factor": 0}, {"rope_theta": "a"}, {"rope_type": []}]


def test_no_value_of_a_field_ends_in_anything_but_a_model_or_a_message():
    for name in [*Fields.model_fields, "architectures", "model_type"]:
        for value in VALUES:
            with suppress(UserError):
                model_config(hf_fields(**{name: value}))


def test_all_faults_come_in_one_message():
    with pytest.raises(UserError, match=r"(?s)2 faults.*latent_moe_dim=4.*hidden_act=relu"):
        model_config(hf_fields(latent_moe_dim=4, hidden_act="relu"))


def test_fields_that_ask_for_nothing_are_passed_over():
    assert model_config(hf_fields(some_new_switch=False, pruned_heads={})) == model_config(
        hf_fields()
    )


@pytest.mark.parametrize(
    "model",
    [
        small(),
        small(norm="reordered", qk_norm="head_gains", attention_gate="headwise"),
        small(qk_norm="full", attention_bias=True, tie_embeddings=True, embedding_scale=2.5),
        small(scalable_softmax=True, attention_gate="elementwise", dtype="bfloat16"),
        small(shared_hidden=0, num_dense_layers=0, embedding_norm=False, embedding_scale=None),
        small(num_dense_layers=6, num_experts=0, top_k=0, expert_hidden=0),
        small(windows=WindowConfig(pattern=(5,))),
        small(windows=WindowConfig(), rope=RopeConfig(on_full_attention=False)),
        small(rope=RopeConfig(theta=1e3, scaling="pi", factor=2.0)),
        small(router=RouterConfig(gating="sigmoid", normalize=2.0, original_top_k=3)),
        small(router=RouterConfig(restore_weight_scale=False, balance_scope="global")),
    ],
)
def test_what_is_written_is_read_back(model: ModelConfig):
    assert model_config(config_fields(model)) == model
