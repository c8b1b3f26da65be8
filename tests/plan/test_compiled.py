"""The plan's memory against compiled steps on the emulated mesh: state to 1%, peak to 15%.

In float32: XLA:CPU holds bf16 results a second time in FP32.
"""

import math

import pytest

from olmo_jax.config.records import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from olmo_jax.inspect.contract import memory_bytes
from olmo_jax.plan.activation_memory import held, workspace
from olmo_jax.plan.state_memory import state_memory
from tests.cases import layout_of

MODEL = ModelConfig(
    num_layers=9,
    d_model=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    top_k=4,
    expert_hidden=256,
    shared_hidden=256,
    dense_hidden=1280,
    vocab_size=2048,
    dtype="float32",
)
FSDP = {"method": "fsdp"}
BLOCK = {"recompute": "block"}


def config_of(mesh, parallel=None, train=None):
    """Return a config with two microbatches, or four under a pipeline, of two sequences."""
    pipeline = mesh.get("pipeline", 1)
    rows = 2 * math.prod(mesh.values()) // pipeline
    settings = {"global_batch": rows * (4 if pipeline > 1 else 2), "microbatch": 2}
    settings |= {"sequence_length": 512, "head_chunk_tokens": 256} | (train or {})
    return Config(
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
        model=MODEL,
        train=TrainConfig(**settings),
    )


STAGES = {"pipeline": 2, "data": 2, "expert": 2}
HALF_ROWS = {"data": 2, "expert": 2, "sequence": 2}
LONG = {"sequence_length": 1024, "global_batch": 16}
CONFIGS = {
    "ddp": config_of({"data": 8}),
    "ddp, whole state": config_of({"data": 8}, {"shard_optimizer": False}),
    "ddp and experts": config_of({"data": 2, "expert": 4}),
    "experts alone": config_of({"expert": 8}),
    "blocks recomputed": config_of({"data": 2, "expert": 4}, train=BLOCK),
    "experts recomputed": config_of({"data": 2, "expert": 4}, train={"recompute": "experts"}),
    "fsdp": config_of({"fsdp": 8}, FSDP),
    "fsdp, kept for the step": config_of({"fsdp": 8}, FSDP | {"reshard": "step"}),
    "hsdp and experts": config_of({"data": 2, "fsdp": 2, "expert": 2}, FSDP),
    "pipeline": config_of(STAGES, {"pipeline_chunks": 2}),
    "pipeline, blocks recomputed": config_of(STAGES, train=BLOCK),
    "ulysses": config_of(HALF_ROWS, train=LONG),
    "ring, folded": config_of(HALF_ROWS, {"context": "ring", "fold_sequence": True}, LONG),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_as_planned(name, program_of):
    config = CONFIGS[name]
    found = memory_bytes(program_of(config).compiled)
    layout = layout_of(config)
    state = state_memory(layout)
    assert state.state == pytest.approx(found["alias"], rel=0.01)
    spaces = sum(held(layout)) + workspace(layout, "cpu").most
    planned = state.persistent + state.gathered + spaces
    assert planned == pytest.approx(found["argument"] + found["temp"], rel=0.15)
