"""Every rule between keys fires, names key and value, and says what would be legal."""

import re

import pytest

from olmo_jax.config.records import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RopeConfig,
    SourceConfig,
    TrainConfig,
)
from olmo_jax.config_file import load, typed
from olmo_jax.errors import UserError
from olmo_jax.rules import validate, with_mesh
from olmo_jax.rules.model import partial_that_rotates, rotated_dims
from olmo_jax.rules.validation import RULES, violations

SOURCES = "data.sources=[{path: tokens}]"

# Overrides of a legal config, and what the message must hold: key and value, numbers, a way out.
WRONG = [
    ("mesh.data=0", "mesh.data=0 is not a number of devices", "1 or more, or -1"),
    ("mesh.expert=-2", "mesh.expert=-2", "1 or more, or -1"),
    ("mesh.data=-1 mesh.fsdp=-1", "mesh.data=-1 and mesh.fsdp=-1", "at most 1", "(1 if unused)"),
    (
        "mesh.pipeline=2 train.global_batch=6 mesh.data=2",
        "train.global_batch=6 makes 3 microbatches of 2 rows",
        "groups of mesh.pipeline=2; use train.global_batch=4 or 8",
    ),
    (
        "mesh.pipeline=2 parallel.pipeline_schedule=1f1b parallel.pipeline_chunks=3 "
        "model.num_layers=9",
        "parallel.pipeline_chunks=3 does not go with parallel.pipeline_schedule=1f1b",
        "parallel.pipeline_schedule=interleaved, or parallel.pipeline_chunks=1",
    ),
    (
        "mesh.pipeline=2 mesh.fsdp=2 parallel.method=fsdp parallel.reshard=after_backward",
        "parallel.reshard=after_backward does not go with a pipeline",
        "use parallel.reshard=step for that, or full",
    ),
    (
        "mesh.pipeline=2 model.windows.pattern=[8,-1] model.num_layers=6",
        "no place for layer 5 of model.num_layers=6: model.windows.pattern=[8, -1]",
        "a stage holds whole repeats; use model.windows.force_full_last=false, "
        "or model.num_layers=5, 7, 9, 11, 13 or 15",
    ),
    (
        "mesh.pipeline=2 model.windows.pattern=[4,-1] model.num_dense_layers=0",
        "2 stages, but the body has 2 layers (model.windows.pattern=[4, -1] repeats every 2",
        "use mesh.pipeline=1 and parallel.pipeline_chunks=1, or model.num_layers=5, 7, 9",
    ),
    (
        "mesh.pipeline=2 parallel.pipeline_chunks=2 model.num_layers=4",
        "mesh.pipeline=2 x parallel.pipeline_chunks=2 are 4 stages",
        "the body has 3 layers; use parallel.pipeline_chunks=1, or model.num_layers=5, 6, 7, 8",
    ),
    (
        "mesh.pipeline=8 model.num_layers=4",
        "8 stages, but the body has 3 layers; use mesh.pipeline=1 to 3 and parallel.pipeline",
    ),
    (
        "mesh.sequence=3",
        "mesh.sequence=3 does not divide model.num_heads=4",
        "use 1, 2 or 4, or parallel.context=ring",
    ),
    (
        "mesh.sequence=4 parallel.context=ring train.sequence_length=7",
        "train.sequence_length=7 has fewer positions than the 8 pieces",
        "use mesh.sequence=3 or less, or train.sequence_length=8 or more",
    ),
    (
        "mesh.expert=4 mesh.sequence=4 parallel.fold_sequence=true",
        "mesh.expert=4 x mesh.sequence=4 = 16 do not divide model.num_experts=8",
        "use mesh.expert=1 or 2, or parallel.fold_sequence=false",
    ),
    (
        "mesh.sequence=4 parallel.fold_sequence=true model.num_experts=6",
        "mesh.expert=1 x mesh.sequence=4 = 4 do not divide model.num_experts=6",
        "use parallel.fold_sequence=false",
    ),
    (
        "run_dir=gs://bucket/run",
        "run_dir=gs://bucket/run is in no file system",
        "write a folder that all processes see",
    ),
    (
        'data.sources=[{"path":a},{"path":b},{"path":a}]',
        "data.sources names a 2 times",
        "name it once, with the sum of the weights",
    ),
    (
        "run_dir=exp[x]",
        "run_dir=exp[x] has [, and * ? [ \\ in a path are a pattern",
        "write a run_dir without",
    ),
    (
        "train.recompute=[query,atention]",
        "train.recompute=[query, atention] has atention",
        "(the nearest is attention)",
        "use none, block, attention, experts, or a list of embedding, query",
    ),
    (
        "train.recompute=block model.router.jitter_eps=0.1",
        "train.recompute=block",
        "model.router.jitter_eps=0.1",
        "use train.recompute=none, or model.router.jitter_eps=null",
    ),
    (
        "mesh.expert=6 model.num_experts=64",
        "mesh.expert=6 does not divide model.num_experts=64; use 1, 2, 4, 8, 16, 32 or 64",
    ),
    (
        "mesh.data=2 mesh.expert=4 train.microbatch=2 train.global_batch=24",
        "train.global_batch=24 is not a multiple of 16",
        "mesh.data=2 x mesh.fsdp=1 x mesh.expert=4 x train.microbatch=2",
        "train.global_batch=16 or 32",
        "train.microbatch=1 or 3",
    ),
    ("mesh.data=16", "train.global_batch=8 is not a multiple of 16", "use train.global_batch=16"),
    ("mesh.data=-1 mesh.expert=2 train.global_batch=7", "train.global_batch=7", "6 or 8"),
    (
        "train.global_batch=65536 train.sequence_length=32768",
        "train.global_batch=65536 x train.sequence_length=32768 x model.top_k=2",
        "2147483647",
        "train.global_batch=32767 or less",
    ),
    (
        "train.sequence_length=1048576 model.num_experts=4096 model.top_k=4096",
        "model.top_k=4096 are 34359738368 routes a step",
        "use train.sequence_length=524287 or less and train.global_batch=1",
    ),
    ("model.num_dense_layers=5", "model.num_dense_layers=5 is above model.num_layers=4", "0 to 4"),
    ("model.dense_hidden=0", "model.dense_hidden=0", "1 of the layers", "model.num_dense_layers=0"),
    ("model.num_experts=0", "model.num_experts=0", "3 of the layers", "model.num_dense_layers=4"),
    ("model.top_k=0", "model.top_k=0", "use 1 or more", "model.num_dense_layers=4"),
    ("model.expert_hidden=0", "model.expert_hidden=0", "use 1 or more"),
    ("model.top_k=9", "model.top_k=9 is above model.num_experts=8", "use 1 to 8"),
    (
        "model.num_kv_heads=3 model.num_heads=8",
        "model.num_kv_heads=3 does not divide model.num_heads=8; use 1, 2, 4 or 8",
    ),
    ("model.head_dim=33", "model.head_dim=33 rotates 33 dims", "model.head_dim=32 or 34"),
    ("model.head_dim=1", "model.head_dim=1 rotates 1", "model.head_dim=2"),
    (
        "model.rope.partial=0.1",
        "model.rope.partial=0.1 of model.head_dim=32 rotates 3 dims",
        "model.rope.partial=0.0625 or 0.125",
    ),
    ("model.rope.partial=0.15 model.head_dim=47", "rotates 7 dims", "partial=0.12766 or 0.170213"),
    (
        "model.rope.partial=0.5 model.head_dim=1",
        "rotates 0 dims",
        "use model.head_dim=2 and model.rope.partial=1.0",
    ),
    ("model.rope.partial=0.01", "rotates 0 dims", "model.rope.partial=0.0625"),
    (
        "model.rope.scaling=yarn model.rope.factor=0.5",
        "model.rope.factor=0.5",
        "model.rope.scaling=yarn",
        "use 1 or more",
    ),
    (
        "model.rope.scaling=stepwise model.rope.low_frequency_factor=4",
        "model.rope.low_frequency_factor=4.0 is not below model.rope.high_frequency_factor=4.0",
        "1 and 4",
    ),
    (
        "model.rope.scaling=yarn model.rope.beta_slow=40",
        "model.rope.beta_slow=40.0 is not below model.rope.beta_fast=32.0",
        "1 and 32",
    ),
    ("model.windows.pattern=[4,0,-1,-3]", "[4, 0, -1, -3] has 0 and -3", "1 or more", "-1 for all"),
    ("model.router.num_groups=4", "model.router.num_groups=4", "write model.router.top_groups"),
    ("model.router.top_groups=4", "model.router.top_groups=4", "write model.router.num_groups"),
    (
        "model.router.num_groups=4 model.router.top_groups=2 model.router.gating=topk_softmax",
        "model.router.num_groups=4",
        "model.router.gating=topk_softmax",
        "softmax or sigmoid",
    ),
    (
        "model.router.num_groups=3 model.router.top_groups=2",
        "model.router.num_groups=3 does not divide model.num_experts=8; use 1, 2, 4 or 8",
    ),
    (
        "model.router.num_groups=2 model.router.top_groups=3",
        "model.router.top_groups=3 is above model.router.num_groups=2",
        "use 1 to 2",
    ),
    (
        "model.router.num_groups=4 model.router.top_groups=1 model.top_k=3",
        "model.top_k=3 is above the 2 experts",
        "model.top_k=2 or less",
        "model.router.top_groups=2 or more",
    ),
    (
        "optim.schedule.warmup=5 optim.schedule.warmup_fraction=0.1",
        "optim.schedule.warmup=5 and optim.schedule.warmup_fraction=0.1",
        "set one of them to null",
    ),
    (
        "optim.schedule.kind=wsd optim.schedule.decay=5 optim.schedule.decay_fraction=0.1",
        "optim.schedule.decay=5 and optim.schedule.decay_fraction=0.1",
        "set one of them to null",
    ),
    (
        "optim.schedule.kind=composable",
        "optim.schedule.kind=composable",
        "optim.schedule.stages=[{duration: 100, end: 1.0}]",
    ),
    (
        "optim.schedule.kind=inverse_sqrt",
        "optim.schedule.kind=inverse_sqrt",
        "its warm-up is 0",
        "optim.schedule.warmup=1 or more",
    ),
    (
        "optim.schedule.warmup=100",
        "optim.schedule.warmup=100 and a decay of 1",
        "train.steps=100",
        "99 or less",
    ),
    (
        "optim.schedule.kind=wsd optim.schedule.warmup_fraction=0.6 "
        "optim.schedule.decay_fraction=0.5",
        "optim.schedule.warmup_fraction=0.6 (= 60) and a decay of 50",
        "use a warm-up of 50 or less",
    ),
    (
        "optim.schedule.unit=tokens optim.schedule.warmup=300000",
        "optim.schedule.warmup=300000",
        "the 204800 tokens of train.steps=100",
    ),
    (
        "optim.schedule.kind=wsd optim.schedule.horizon=50 optim.schedule.warmup=46",
        "optim.schedule.warmup=46 and a decay of 5",
        "optim.schedule.horizon=50",
        "45 or less",
    ),
    (
        "optim.schedule.kind=wsd optim.schedule.decay=200",
        "a decay of 200 are longer than train.steps=100",
        "use a decay of 100 or less",
    ),
    ("train.eval_every=5", "train.eval_every=5", "data.eval_fraction=0.01", "train.eval_every=0"),
    ("data.sources=[]", "data.sources=[]", "write data.sources=[{path: DIR}]"),
]


def overrides_of(line: str) -> list[str]:
    return [SOURCES, *line.split()]


@pytest.mark.parametrize(
    "line",
    [
        "mesh.pipeline=2 model.windows.pattern=[8,-1] model.num_layers=6",
        "mesh.pipeline=4 model.windows.pattern=[8,8,8,-1] model.num_layers=10",
        "mesh.pipeline=2 parallel.pipeline_chunks=3",
        "mesh.pipeline=8",
    ],
)
def test_every_number_of_layers_that_a_pipeline_asks_for_is_taken(line):
    given = overrides_of(f"{line} train.global_batch=16")
    with pytest.raises(UserError) as raised:
        load(None, given)
    [listed] = re.findall(r"model\.num_layers=([\d, or]+)$", str(raised.value))
    numbers = re.findall(r"\d+", listed)
    assert len(numbers) >= 2
    for number in numbers:
        load(None, [*given, f"model.num_layers={number}"])


@pytest.mark.parametrize(("line", "fragments"), [(line, rest) for line, *rest in WRONG])
def test_wrong_config_is_told_its_one_fault(line, fragments):
    with pytest.raises(UserError) as raised:
        load(None, overrides_of(line))
    text = str(raised.value)
    assert "\n" not in text
    assert all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize("partial", [0.01, 0.15, 0.58, 0.99])
def test_the_share_of_rotated_dims_that_a_message_offers_is_legal(partial):
    for width in range(2, 513):
        model = ModelConfig(head_dim=width, rope=RopeConfig(partial=partial))
        for text in rotated_dims(Config(model=model)):
            offered = text.rpartition("model.rope.partial=")[2].split(" or ")
            for share in map(float, offered):
                mended = ModelConfig(head_dim=width, rope=RopeConfig(partial=share))
                assert not list(rotated_dims(Config(model=mended))), text


def test_every_even_number_of_dims_has_a_share():
    for width in [*range(2, 513), 65_536]:
        for num_dims in range(2, width + 1, 2):
            share = partial_that_rotates(num_dims, width)
            assert share <= 1
            assert int(width * share) == num_dims


def test_every_rule_has_a_wrong_config():
    configs = [typed(None, overrides_of(line)) for line, *_ in WRONG]
    assert all(any(list(rule(config)) for config in configs) for rule in RULES)


@pytest.mark.parametrize(
    "line",
    [
        "seed=1",
        "mesh.data=-1 mesh.expert=4",
        "mesh.data=2 mesh.fsdp=2 mesh.expert=2",
        "model.num_dense_layers=4 model.num_experts=0 model.top_k=0 model.expert_hidden=0",
        "model.num_dense_layers=4 model.num_experts=0 mesh.expert=4",
        "model.num_dense_layers=0 model.dense_hidden=0",
        "model.router.gating=topk_softmax model.router.assignment=random",
        "model.router.gating=topk_softmax model.router.bias_gamma=0.001",
        "model.router.num_groups=4 model.router.top_groups=2 model.router.gating=sigmoid",
        "optim.schedule.kind=constant optim.schedule.warmup=1000",
        "optim.schedule.kind=wsd optim.schedule.warmup=90 optim.schedule.decay=10",
        "optim.schedule.kind=inverse_sqrt optim.schedule.warmup=5",
    ],
)
def test_legal_config_passes(line):
    load(None, overrides_of(line))


def test_all_violations_are_listed():
    config = Config(mesh=MeshConfig(expert=3), train=TrainConfig(eval_every=1))
    assert len(violations(config)) == 3
    with pytest.raises(UserError) as raised:
        validate(config)
    text = str(raised.value)
    assert text.startswith("3 faults in the config:\n  - ")
    assert all(key in text for key in ("mesh.expert=3", "train.eval_every=1", "data.sources=[]"))


def test_mesh_is_checked_again_when_its_open_axis_is_known():
    config = load(None, [SOURCES, "mesh.data=-1", "train.global_batch=8"])
    sizes = {"pipeline": 1, "data": 4, "fsdp": 1, "expert": 1, "sequence": 1}
    assert with_mesh(config, sizes).mesh == MeshConfig(data=4)
    with pytest.raises(UserError, match=r"train\.global_batch=8 is not a multiple of 16"):
        with_mesh(config, sizes | {"data": 16})


def test_validate_returns_the_config():
    config = Config(data=DataConfig(sources=(SourceConfig(path="tokens"),)))
    assert validate(config) is config
