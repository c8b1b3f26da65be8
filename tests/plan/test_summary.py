"""What `olmo-jax check` says of a valid config."""

import time

import pytest

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SourceConfig,
    TrainConfig,
    WindowConfig,
)
from olmo_jax.formatting import amount
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.slots import slot_bytes
from olmo_jax.plan.state_memory import whole_when_saved
from olmo_jax.plan.summary import summary, warnings
from tests.cases import layout_of


def test_a_glob_that_matches_no_parameter_is_named_with_a_name_that_exists():
    [text] = warnings(Config(optim=OptimConfig(no_decay=("embedding.*", "*nrom*"))))
    assert "'*nrom*'" in text
    assert any(repr(name) in text for name in parameters(ModelConfig()))


def test_the_default_globs_are_for_all_models_and_warn_for_none():
    assert warnings(Config()) == []


SOURCES = DataConfig(sources=(SourceConfig(path="tokens"),))


def most(key: str) -> int:
    """Return the largest value that a key of the model may have."""
    return next(rule.le for rule in ModelConfig.model_fields[key].metadata if hasattr(rule, "le"))


SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k")
SIZES += ("expert_hidden", "shared_hidden", "dense_hidden", "vocab_size")
DEEP = {"num_layers": most("num_layers")}
LARGE = {
    "layers": DEEP | {"windows": WindowConfig(pattern=(4, 4, 4, -1))},
    "a long pattern": DEEP | {"windows": WindowConfig(pattern=tuple(range(1, 500)))},
    "dense layers": DEEP | {"num_dense_layers": most("num_layers") - 1},
    "sizes": {key: most(key) for key in SIZES},
}


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_models_are_described_at_once(name):
    start = time.process_time()
    assert "FLOPs" in summary(Config(model=ModelConfig(**LARGE[name]), data=SOURCES))
    # A tenth of a second without the type checks of a test run.
    assert time.process_time() - start < 4


def pipelined(num_layers: int, schedule: str, chunks: int) -> Config:
    return Config(
        mesh=MeshConfig(pipeline=4),
        model=ModelConfig(num_layers=num_layers, num_dense_layers=2),
        parallel=ParallelConfig(pipeline_schedule=schedule, pipeline_chunks=chunks),
        train=TrainConfig(global_batch=8),
        data=SOURCES,
    )


@pytest.mark.parametrize(
    ("config", "times", "held", "places"),
    [
        (
            pipelined(39, "interleaved", 2),
            "4 ranks x 2 chunk(s), interleaved: bubble 3/19 = 15.8% of the time",
            "the first rank holds up to 11 chunk activations, the last 5; 11 slots on each, ",
            "3 of 40 layer positions are padding, no other chunk count leaves fewer",
        ),
        (
            pipelined(39, "interleaved", 3),
            "4 ranks x 3 chunk(s), interleaved: bubble 3/27 = 11.1% of the time",
            "the first rank holds up to 15 chunk activations, the last 9; 15 slots on each, ",
            "11 of 48 layer positions are padding; "
            "parallel.pipeline_chunks=1, 2 or 5 leaves fewest, 3",
        ),
        (
            pipelined(10, "gpipe", 1),
            "4 ranks x 1 chunk(s), gpipe: bubble 3/11 = 27.3% of the time",
            "the first rank holds up to 8 chunk activations, the last 8; 9 slots on each, ",
            "0 of 8 layer positions are padding",
        ),
    ],
    ids=["least waste", "another count leaves fewer", "no waste"],
)
def test_a_pipeline_is_described_by_its_bubble_its_slots_and_its_places(
    config, times, held, places
):
    lines = summary(config).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  pipeline "))
    first, second, third = (line[len("  pipeline    ") :] for line in lines[start : start + 3])
    assert (first, third) == (times, places)
    size = slot_bytes(layout_of(config))
    assert second == f"{held}{amount(size)}B in all"


def test_a_mesh_without_a_pipeline_says_nothing_of_one():
    assert "pipeline" not in summary(Config(data=SOURCES))


def test_a_number_of_ranks_that_divides_no_width_is_told_with_its_bytes():
    model = ModelConfig(num_layers=7)
    config = Config(model=model, data=SOURCES, train=TrainConfig(global_batch=12))
    for ranks, is_told in ((2, False), (3, True)):
        text = summary(config.model_copy(update={"mesh": MeshConfig(pipeline=ranks)}))
        assert (f"{ranks} divides no width" in text) == is_told
    # All six layers of the body: FP32 weights and two moments.
    body = sum(leaf.size for name, leaf in parameters(model).items() if name.startswith("body."))
    assert whole_when_saved(Layout(config, {**dict.fromkeys(AXES, 1), "pipeline": 3})) == 12 * body
