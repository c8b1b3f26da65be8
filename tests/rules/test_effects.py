"""A key that was changed and changes nothing is named with the reason."""

import pytest

from olmo_jax.config.messages import known_keys
from olmo_jax.config.records import Config
from olmo_jax.config_file import typed
from olmo_jax.rules import without_effect
from olmo_jax.rules.effects import IDLE

# Overrides, the key that has no effect, the key in the reason.
CASES = [
    (
        ["parallel.method=fsdp", "mesh.fsdp=2", "parallel.shard_optimizer=false"],
        "parallel.shard_optimizer",
        "parallel.method=fsdp",
    ),
    (
        ["model.num_dense_layers=4", "train.recompute=experts"],
        "train.recompute",
        "no result that it names",
    ),
    (["train.recompute=[attention_gate]"], "train.recompute", "no result that it names"),
    (["parallel.reshard=step"], "parallel.reshard", "parallel.method=fsdp"),
    (["parallel.method=fsdp", "mesh.data=2"], "parallel.method", "mesh.fsdp"),
    (["parallel.capacity_factor=2"], "parallel.capacity_factor", "mesh.expert=1"),
    (["model.num_dense_layers=4", "mesh.expert=2"], "mesh.expert", "no layer is routed"),
    (["model.rope.factor=8"], "model.rope.factor", "model.rope.scaling"),
    (["model.rope.beta_fast=8", "model.rope.scaling=pi"], "model.rope.beta_fast", "scaling"),
    (["model.rope.scaled_layers=all"], "model.rope.scaled_layers", "model.rope.scaling=none"),
    (
        ["model.rope.scaling=pi", "model.rope.on_full_attention=false"],
        "model.rope.scaling",
        "model.rope.scaled_layers=full",
    ),
    (["model.windows.force_full_first=false"], "model.windows.force_full_first", "pattern=[]"),
    (["model.windows.pattern=[512,-1]"], "model.windows.pattern", "train.sequence_length"),
    (
        ["model.attention_gate_full_precision=false"],
        "model.attention_gate_full_precision",
        "model.attention_gate=none",
    ),
    (
        ["model.dense_hidden=64", "model.num_dense_layers=0"],
        "model.dense_hidden",
        "model.num_dense_layers=0",
    ),
    (
        ["model.init.method=llama", "model.init.embedding_std=1"],
        "model.init.embedding_std",
        "normal",
    ),
    (
        ["model.num_dense_layers=4", "model.router.gating=sigmoid"],
        "model.router.gating",
        "no layer is routed",
    ),
    (["model.router.sigmoid_epsilon=0"], "model.router.sigmoid_epsilon", "gating=sigmoid"),
    (["model.router.original_top_k=2"], "model.router.original_top_k", "model.top_k"),
    (
        ["model.router.num_groups=4", "model.router.top_groups=4"],
        "model.router.top_groups",
        "equals model.router.num_groups",
    ),
    (
        ["model.router.assignment=random", "model.router.bias_gamma=0.1"],
        "model.router.bias_gamma",
        "model.router.assignment",
    ),
    (
        ["model.router.score_correction_bias=true", "model.router.bias_gamma=0.1"],
        "model.router.score_correction_bias",
        "model.router.bias_gamma",
    ),
    (
        ["model.router.balance_weight=0", "model.router.balance_scope=global"],
        "model.router.balance_scope",
        "no balance loss",
    ),
    (["optim.skip_window=64"], "optim.skip_window", "optim.skip_sigma=null"),
    (["optim.weight_decay=0", "optim.no_decay=[]"], "optim.no_decay", "optim.weight_decay=0"),
    (["optim.schedule.decay=5"], "optim.schedule.decay", "optim.schedule.kind"),
    (
        ["optim.schedule.kind=constant", "optim.schedule.final=0"],
        "optim.schedule.final",
        "optim.schedule.kind",
    ),
    (
        ["optim.schedule.stages=[{duration: 1, end: 1}]"],
        "optim.schedule.stages",
        "optim.schedule.kind",
    ),
    (
        ["optim.schedule.kind=constant", "optim.schedule.horizon=50"],
        "optim.schedule.horizon",
        "measured by it",
    ),
    (["optim.schedule.warmup_start=0.5"], "optim.schedule.warmup_start", "no warm-up"),
    (
        [
            "optim.schedule.kind=composable",
            "optim.schedule.stages=[{duration: 1, end: 1}]",
            "optim.schedule.warmup=5",
        ],
        "optim.schedule.warmup",
        "optim.schedule.kind",
    ),
    (["train.eval_batches=2"], "train.eval_batches", "data.eval_fraction=0"),
    (["checkpoint.init_moments=true"], "checkpoint.init_moments", "checkpoint.init_from=null"),
]


@pytest.mark.parametrize(("overrides", "key", "reason"), CASES)
def test_key_without_effect_is_named(overrides, key, reason):
    warnings = [text for text in without_effect(typed(None, overrides)) if f"{key}=" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{key}=")
    assert reason in warnings[0]
    assert warnings[0].endswith("drop the key")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.expert=2", "parallel.capacity_factor=2"],
        ["model.rope.scaling=yarn", "model.rope.factor=8", "model.rope.scaled_layers=all"],
        ["model.windows.pattern=[64,-1]", "model.windows.force_full_first=false"],
        ["model.router.gating=sigmoid", "model.router.sigmoid_epsilon=0"],
        ["model.router.normalize=null", "model.router.restore_weight_scale=false"],
        ["optim.skip_sigma=6", "optim.skip_window=64"],
        ["optim.schedule={kind: constant, horizon: 50, warmup_fraction: 0.1, warmup_start: 0.5}"],
        ["train.eval_every=5", "train.eval_batches=2", "data.eval_fraction=0.1"],
        ["mesh.sequence=-1", "train.recompute=[exchanged_query]"],
    ],
)
def test_keys_that_are_read_do_not_warn(overrides):
    assert without_effect(typed(None, overrides)) == []


def test_table_names_only_keys_that_exist():
    assert {key for idle in IDLE for key in idle.keys} <= set(known_keys(Config))
