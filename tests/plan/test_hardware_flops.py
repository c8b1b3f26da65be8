"""Executed FLOPs: equal to a count on the traced step, on one device and on a mesh."""

import math

import pytest

from olmo_jax.arch.flops import Flops, flops_per_token
from olmo_jax.arch.sizes import block_pairs
from olmo_jax.config.records import (
    Config,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    WindowConfig,
)
from olmo_jax.inspect.jaxpr import live, matmul_flops
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.plan.flops import block_pairs_count, device_model_flops, hardware_flops
from olmo_jax.train.program import build
from tests.cases import layout_of

MODEL = ModelConfig(
    num_layers=3,
    d_model=24,
    num_heads=6,
    head_dim=10,
    num_experts=8,
    expert_hidden=20,
    shared_hidden=12,
    dense_hidden=28,
    vocab_size=67,
)
# 515 positions are three attention blocks of 172; 1,030 tokens are six chunks of 200 in the head,
# nine tiles in the embedding's gradient, and 2,575 of the rows that four ranks can send.
CONFIGS = {
    "windows, elementwise gate, tied head, data x expert": Config(
        mesh=MeshConfig(data=2, expert=4),
        model=MODEL.model_copy(
            update={
                "num_layers": 6,
                "windows": WindowConfig(pattern=(100, -1)),
                "attention_gate": "elementwise",
                "tie_embeddings": True,
            }
        ),
        train=TrainConfig(
            global_batch=48, microbatch=2, sequence_length=515, head_chunk_tokens=200
        ),
    ),
    "one expert a rank with room for all rows, no shared expert": Config(
        mesh=MeshConfig(expert=8),
        model=MODEL.model_copy(update={"shared_hidden": 0, "attention_bias": True}),
        parallel=ParallelConfig(capacity_factor=9.0),
        train=TrainConfig(global_batch=8, sequence_length=23),
    ),
    "one device, headwise gate, no dense layer": Config(
        model=MODEL.model_copy(
            update={"num_dense_layers": 0, "attention_gate": "headwise", "dtype": "float32"}
        ),
        parallel=ParallelConfig(capacity_factor=0.5),
        train=TrainConfig(global_batch=3, sequence_length=301),
    ),
    "blocks recomputed, norms after": Config(
        mesh=MeshConfig(fsdp=2, expert=2),
        model=MODEL.model_copy(update={"norm": "peri", "attention_gate": "headwise"}),
        parallel=ParallelConfig(method="fsdp"),
        train=TrainConfig(global_batch=4, sequence_length=23, recompute="block"),
    ),
    "blocks recomputed, norms before": Config(
        mesh=MeshConfig(expert=2),
        model=MODEL.model_copy(update={"norm": "pre", "num_layers": 2}),
        train=TrainConfig(global_batch=2, sequence_length=300, recompute="block"),
    ),
    "some results recomputed": Config(
        model=MODEL,
        train=TrainConfig(
            global_batch=1,
            sequence_length=23,
            recompute=("key", "attention_logsumexp", "expert_output", "mlp_hidden", "combined"),
        ),
    ),
    "the logits of the head too": Config(
        model=MODEL,
        train=TrainConfig(global_batch=1, sequence_length=23, recompute=("head_normaliser",)),
    ),
    "Ulysses, rows of three blocks, folded": Config(
        mesh=MeshConfig(expert=2, sequence=2),
        model=MODEL,
        parallel=ParallelConfig(fold_sequence=True),
        train=TrainConfig(global_batch=4, sequence_length=515, head_chunk_tokens=200),
    ),
    "a ring, windows, pieces of three blocks, attention recomputed": Config(
        mesh=MeshConfig(sequence=4),
        model=MODEL.model_copy(update={"windows": WindowConfig(pattern=(700, -1))}),
        parallel=ParallelConfig(context="ring"),
        train=TrainConfig(global_batch=1, sequence_length=4120, recompute="attention"),
    ),
    "all dense": Config(
        mesh=MeshConfig(data=2),
        model=MODEL.model_copy(update={"num_dense_layers": 3, "num_experts": 0, "top_k": 0}),
        train=TrainConfig(global_batch=8, sequence_length=23),
    ),
}


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def config(request):
    return request.param


def test_hardware_flops_are_those_of_the_traced_step(config):
    program = build(config, build_mesh(dict(config.mesh)))
    traced = program.jitted.trace(*program.abstract_arguments())
    counted = hardware_flops(layout_of(config))
    assert sum(counted.values(), start=Flops()).total == matmul_flops(live(traced.jaxpr))


def test_model_flops_of_all_devices_are_those_of_all_tokens(config):
    sizes, train = dict(config.mesh), config.train
    one_device = sum(part.total for part in device_model_flops(layout_of(config)).values())
    tokens = train.global_batch * train.sequence_length
    expected = flops_per_token(config.model, train.sequence_length) * tokens
    assert one_device * math.prod(sizes.values()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 515, 1024, 4097])
@pytest.mark.parametrize("window", [None, 1, 2, 100, 256, 257, 258, 5000])
def test_pairs_of_blocks_are_counted_as_they_are_listed(length, window):
    assert block_pairs_count(length, window) == len(block_pairs(length, window))
