"""A model that the Hugging Face class would compute otherwise is not written."""

import pytest

from olmo_jax.config.records import RopeConfig, RouterConfig, WindowConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.expressible import check_expressible
from tests.interop.small import small


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm": "pre"}, ["model.norm=pre", "model.norm=reordered or peri"]),
        ({"qk_norm": "none"}, ["model.qk_norm=none", "head, head_gains or full"]),
        ({"clip_qkv": 8.0}, ["model.clip_qkv=8.0", "model.clip_qkv=null"]),
        ({"rope": RopeConfig(partial=0.5)}, ["model.rope.partial=0.5", "=1.0"]),
        ({"rope": RopeConfig(full_precision=False)}, ["model.rope.full_precision=false", "=true"]),
        ({"rope": RopeConfig(on_full_attention=False)}, ["model.rope.on_full_attention=false"]),
        (
            {"rope": RopeConfig(scaling="yarn", theta=1e4, original_length=10**6)},
            ["model.rope.scaling=yarn", "original_length=1000000", "model.head_dim=4"],
        ),
        ({"windows": WindowConfig(pattern=(4, 8))}, ["model.windows.pattern=[4, 8]", "4 and 8"]),
        (
            {"attention_bias": True, "attention_gate": "headwise"},
            ["model.attention_gate=headwise", "model.attention_bias=false"],
        ),
        ({"router": RouterConfig(bias=True)}, ["model.router.bias=true", "=false"]),
        ({"router": RouterConfig(bias_gamma=0.001)}, ["model.router.bias_gamma=0.001", "=null"]),
        (
            {"router": RouterConfig(score_correction_bias=True)},
            ["model.router.score_correction_bias=true"],
        ),
        (
            {"router": RouterConfig(expert_weight_scale=2.5)},
            ["model.router.expert_weight_scale=2.5"],
        ),
        ({"router": RouterConfig(gating="topk_softmax")}, ["topk_softmax", "softmax or sigmoid"]),
        ({"router": RouterConfig(assignment="random")}, ["assignment=random", "=learned"]),
        (
            {"router": RouterConfig(num_groups=3, top_groups=2)},
            ["model.router.num_groups=3", "=null"],
        ),
        (
            {"router": RouterConfig(gating="sigmoid", sigmoid_epsilon=0.0)},
            ["model.router.sigmoid_epsilon=0.0", "=1e-7"],
        ),
    ],
)
def test_each_key_in_the_way_is_named_with_what_can_be_written(fields, words):
    with pytest.raises(UserError) as caught:
        check_expressible(small(**fields))
    assert [word for word in words if word not in str(caught.value)] == []


def test_keys_that_only_train_are_not_in_the_way():
    check_expressible(small(router=RouterConfig(jitter_eps=0.1, balance_weight=0.0, z_weight=0.0)))


def test_a_model_without_routed_layers_may_say_anything_about_routers():
    check_expressible(small(num_dense_layers=6, router=RouterConfig(bias=True)))
