"""The plan of a pipelined step: what it sends, multiplies and holds, as counted on its jaxpr."""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from olmo_jax.arch.flops import Flops
from olmo_jax.arch.layers import body_stages
from olmo_jax.arch.parameters import parameters
from olmo_jax.arch.sizes import capacity, received_rows
from olmo_jax.config.records import WindowConfig
from olmo_jax.inspect import hlo, jaxpr
from olmo_jax.inspect.contract import memory_bytes
from olmo_jax.mesh.axes import num_expert_ranks
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.ops.target import Target, tracing_for
from olmo_jax.parallel.pipeline import bubble, executor, of_layout, peak_live
from olmo_jax.parallel.pipeline.segments import tables
from olmo_jax.plan import slots
from olmo_jax.plan.flops import hardware_flops
from olmo_jax.plan.pass_counts import num_ticks
from olmo_jax.plan.state_memory import state_memory
from olmo_jax.train.program import build
from tests import cases
from tests.cases import layout_of
from tests.plan.traffic import counted, planned

FSDP = {"method": "fsdp"}
GLOBAL = {"balance_scope": "global"}


def config_of(mesh, parallel, microbatches, *, microbatch=1, **others):
    """Return a config with so many microbatches; seven layers, two of them dense, by default."""
    given = dict(parallel)
    model = {"num_layers": 7, "num_dense_layers": 2, "dtype": "bfloat16"}
    data_ranks = math.prod(mesh.values()) // mesh.get("pipeline", 1) // mesh.get("sequence", 1)
    return cases.tiny(
        mesh,
        shard_optimizer=given.pop("shard_optimizer", True),
        parallel=given,
        microbatch=microbatch,
        global_batch=microbatches * microbatch * data_ranks,
        model=model | others.pop("model", {}),
        **others,
    )


def schedule_of(name, chunks=1):
    return {"pipeline_schedule": name, "pipeline_chunks": chunks}


@dataclass(frozen=True)
class Traced:
    """What is read off one traced step."""

    collectives: dict[Any, list[float]]
    flops: int
    kept: Counter[tuple[str, tuple[int, ...]]]
    slot_bytes: int
    waiting_bytes: int
    gradient_bytes: int
    state_bytes: int


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def size_of_shards(tree):
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@cache
def traced(config):
    """Trace the step of a config, and look at the machine that the executor makes."""
    seen = {}

    def assemble(*arguments):
        seen["machine"] = assembled(*arguments)
        return seen["machine"]

    def at_the_start(machine):
        seen["carry"] = started(machine)
        return seen["carry"]

    program = build(config, build_mesh(dict(config.mesh)))
    with pytest.MonkeyPatch.context() as patch:
        assembled, started = executor.assemble, executor.at_the_start
        patch.setattr(executor, "assemble", assemble)
        patch.setattr(executor, "at_the_start", at_the_start)
        arguments = program.abstract_arguments()
        step = jaxpr.live(program.jitted.trace(*arguments).jaxpr)
    shapes = seen["machine"].parts.body.shapes.saved
    return Traced(
        collectives=counted(step, dict(config.mesh)),
        flops=jaxpr.matmul_flops(step),
        kept=Counter((str(leaf.dtype), tuple(leaf.shape)) for leaf in shapes),
        slot_bytes=size_of(seen["carry"].slots),
        waiting_bytes=size_of(seen["carry"]._replace(gradients=None, sums=None)),
        gradient_bytes=size_of(seen["carry"].gradients),
        state_bytes=size_of_shards(arguments[0]),
    )


ODD = {"pipeline": 2, "fsdp": 2, "expert": 2}
"""Of five routed layers two ranks leave one place empty, and two chunks each three."""

IN_MAKE_TEST = {
    "interleaved, fsdp, empty places": config_of(ODD, FSDP | schedule_of("interleaved", 2), 4),
    "four ranks, everything computed again, head of uneven rows": config_of(
        {"pipeline": 4, "expert": 2},
        schedule_of("1f1b"),
        8,
        router=GLOBAL,
        train={"recompute": "block"},
    ),
}
MATRIX = {
    **{
        f"{name} of {ranks} ranks, {chunks} chunks, {groups} groups": config_of(
            {"pipeline": ranks, "data": 2} if ranks == 4 else ODD,
            ({} if ranks == 4 else FSDP) | schedule_of(name, chunks),
            groups * ranks,
            model={"num_layers": 2 + ranks * chunks + (groups == 2)},
        )
        for name, ranks, chunks, groups in (
            ("interleaved", 2, 3, 4),
            ("interleaved", 4, 1, 1),
            ("interleaved", 4, 2, 2),
            ("interleaved", 4, 3, 4),
            ("1f1b", 2, 1, 1),
            ("gpipe", 2, 2, 2),
            ("gpipe", 4, 1, 4),
        )
    },
    **{
        f"{again} computed again": config_of(
            ODD,
            FSDP | schedule_of("interleaved", 2),
            4,
            model={"norm": norm, "tie_embeddings": True},
            router=GLOBAL,
            train={"recompute": again},
        )
        for again, norm in (
            ("attention", "peri"),
            ("experts", "peri"),
            (("embedding", "expert_rows", "route_plan"), "peri"),
            (("combined", "balance_counts", "key"), "peri"),
            (("combined", "head_normaliser", "attention_logsumexp"), "pre"),
        )
    },
    "gpipe, gathered for the step, tied": config_of(
        ODD,
        FSDP | {"reshard": "step"} | schedule_of("gpipe"),
        2,
        model={"tie_embeddings": True},
        router=GLOBAL,
    ),
    "uniform routes": config_of(
        ODD, FSDP, 4, router=GLOBAL | {"assignment": "uniform"}, train={"recompute": ("combined",)}
    ),
    "windows, a routed layer before the body": config_of(
        ODD,
        FSDP | schedule_of("interleaved", 2),
        4,
        model={
            "num_layers": 11,
            "num_dense_layers": 0,
            "windows": WindowConfig(pattern=(-1, 4), force_full_first=True, force_full_last=False),
        },
        router=GLOBAL,
    ),
    "other gates, jitter, two rows a microbatch": config_of(
        {"pipeline": 2, "fsdp": 3},
        FSDP | schedule_of("interleaved", 2),
        4,
        microbatch=2,
        model={"attention_gate": "elementwise", "norm": "reordered", "shared_hidden": 0},
        router={"gating": "sigmoid", "assignment": "learned", "jitter_eps": 0.1, "bias": True},
    ),
    "all dense, whole state, float32": config_of(
        {"pipeline": 2, "data": 2},
        {"shard_optimizer": False} | schedule_of("interleaved", 2),
        4,
        model={"num_dense_layers": 7, "dtype": "float32"},
    ),
    "Ulysses, folded, other gates": config_of(
        {"pipeline": 2, "expert": 2, "sequence": 2},
        {"fold_sequence": True} | schedule_of("interleaved", 2),
        4,
        model={"attention_gate": "elementwise"},
        train={"sequence_length": 45},
    ),
    "Ulysses, no norm of queries and keys, exchanged again": config_of(
        {"pipeline": 2, "sequence": 2},
        {},
        2,
        model={"qk_norm": "none", "scalable_softmax": True},
        train={"sequence_length": 45, "recompute": ("exchanged_key_value",)},
    ),
    "a ring, fsdp, windows": config_of(
        {"pipeline": 2, "fsdp": 2, "sequence": 2},
        {"context": "ring"} | FSDP | schedule_of("interleaved"),
        4,
        microbatch=2,
        model={
            "num_layers": 6,
            "windows": WindowConfig(pattern=(4, -1), force_full_first=False, force_full_last=False),
        },
        train={"sequence_length": 43},
    ),
    "a ring of four, attention computed again": config_of(
        {"pipeline": 2, "sequence": 4},
        {"context": "ring"},
        2,
        train={"recompute": "attention", "sequence_length": 85},
    ),
    "no room for all rows": config_of(
        {"pipeline": 2, "expert": 4}, schedule_of("interleaved", 2), 2, capacity_factor=1.1
    ),
}
ALL = [
    *(pytest.param(config, id=name) for name, config in IN_MAKE_TEST.items()),
    *(pytest.param(config, id=name, marks=pytest.mark.matrix) for name, config in MATRIX.items()),
]


@pytest.mark.parametrize("config", ALL)
def test_every_schedule_sends_what_the_plan_says(config):
    found, wanted = traced(config).collectives, planned(config)
    assert found.keys() == wanted.keys()
    for key, (count, put_in, sent) in found.items():
        assert wanted[key][:2] == [count, put_in], key
        # Thirds are not exact in floats.
        assert wanted[key][2] == pytest.approx(sent, rel=1e-14), key


@pytest.mark.parametrize("config", ALL)
def test_hardware_flops_are_those_of_every_tick(config):
    hardware = hardware_flops(layout_of(config))
    assert sum(hardware.values(), start=Flops()).total == traced(config).flops


@pytest.mark.parametrize("config", ALL)
def test_a_slot_holds_the_results_that_the_policy_names(config):
    wanted = slots.stage_residuals(layout_of(config))
    assert traced(config).kept == Counter((each.dtype, each.shape) for each in wanted)
    assert traced(config).slot_bytes == slots.slot_bytes(layout_of(config))


def token_dims(config, sizes):
    """Return the dims that count tokens of a microbatch, or rows of the experts."""
    train, model = config.train, config.model
    positions = layout_of(config).positions
    experts = num_expert_ranks(sizes, fold_sequence=config.parallel.fold_sequence)
    tokens = train.microbatch * positions
    limit = capacity(config.parallel.capacity_factor, tokens, max(model.top_k, 1))
    rows = received_rows(tokens, model.top_k, experts, limit)
    # Whole rows under Ulysses; a ring's pieces are halves.
    seen = {positions, positions * sizes["sequence"]}
    cut = 2 if sizes["sequence"] > 1 and config.parallel.context == "ring" else 1
    queries = {n // cut * model.num_heads // model.num_kv_heads for n in seen}
    return {*seen, *queries, tokens, experts * tokens, rows}


@pytest.mark.parametrize("config", ALL)
def test_nothing_that_follows_from_weights_alone_lies_in_a_slot(config):
    """All arrays of floats have tokens; the others are at most a row's count of each expert."""
    dims = token_dims(config, dict(config.mesh))
    counts = max(config.train.microbatch * config.model.num_experts, 1)
    assert dims.isdisjoint(d for leaf in parameters(config.model).values() for d in leaf.shape)
    for dtype, shape in traced(config).kept:
        small = "float" not in dtype and math.prod(shape[1:]) <= counts
        assert small or dims & {*shape}, (dtype, shape)


@pytest.mark.parametrize("config", ALL)
def test_a_device_holds_the_state_and_the_gradients_that_the_plan_says(config):
    wanted = state_memory(layout_of(config))
    assert traced(config).state_bytes == wanted.state
    assert traced(config).gradient_bytes == wanted.gradients


def _schedule(config):
    return of_layout.schedule_of(layout_of(config))


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["interleaved", "gpipe"])
def test_closed_forms_are_those_of_the_schedules(name, ranks, chunks, groups):
    config = config_of({"pipeline": ranks}, schedule_of(name, chunks), groups * ranks)
    schedule = _schedule(config)
    ticks = num_ticks(ranks, chunks, groups * ranks)
    assert schedule.forward.valid.any(axis=1).sum() == ticks
    assert schedule.backward.valid.any(axis=1).sum() == ticks
    assert bubble(schedule) == Fraction(ranks - 1, ticks)
    assert tables(schedule).num_slots == slots.num_slots(layout_of(config))
    live = [slots.peak_live(layout_of(config), rank) for rank in range(ranks)]
    np.testing.assert_array_equal(live, peak_live(schedule))


def hardware(config):
    return sum(hardware_flops(layout_of(config)).values(), start=Flops()).total


@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize(("layers", "padding"), [(10, 0), (9, 1), (7, 3)])
def test_hardware_flops_are_one_devices_stretched_by_bubble_and_padding(
    layers, padding, microbatches
):
    """The padding is what idle ticks and padding layers add, and nothing else."""
    # Four ranks divide the rows of the head.
    train = {"sequence_length": 64}
    four = config_of(
        {"pipeline": 4},
        schedule_of("interleaved", 2),
        microbatches,
        model={"num_layers": layers},
        train=train,
    )
    assert body_stages(four.model, 4, 2).num_padding == padding
    one, longer = (
        hardware(config_of({}, {}, microbatches, model={"num_layers": n}, train=train))
        for n in (layers, layers + 1)
    )
    body = (layers - 2) * (longer - one)
    stretched = Fraction(body * 8, layers - 2) / (1 - bubble(_schedule(four)))
    assert hardware(four) == (stretched + one - body) / 4


@pytest.mark.matrix
@pytest.mark.parametrize("microbatches", [8, 32])
def test_flops_of_a_device_are_those_of_the_bubble(microbatches):
    """They are (body / (1 - bubble) + dense blocks and head) / ranks: nothing is computed twice.

    A grouped product counts its routed rows: `lax.ragged_dot`, which a TPU gets, asks for no
    others.
    """

    def flops(layers, mesh, microbatches, chunks=1):
        config = config_of(
            mesh,
            schedule_of("interleaved", chunks),
            microbatches,
            model={"num_layers": layers},
            # Four ranks divide the rows of the head.
            train={"recompute": "none", "sequence_length": 64},
        )
        program = build(config, build_mesh(dict(config.mesh)))
        with tracing_for(Target("tpu")):
            step = program.jitted.trace(*program.abstract_arguments()).jaxpr
        return config, jaxpr.matmul_flops(jaxpr.live(step))

    # Either data rank has its own microbatches.
    config, found = flops(10, {"pipeline": 4, "data": 2}, microbatches, chunks=2)
    assert body_stages(config.model, 4, 2).num_padding == 0
    three, four = (microbatches * flops(layers, {}, 1)[1] for layers in (3, 4))
    body = 8 * (four - three)
    ends = three - (four - three)
    assert found == (body / (1 - bubble(_schedule(config))) + ends) / 4


@pytest.mark.matrix
def test_program_and_temporary_memory_do_not_depend_on_the_number_of_microbatches():
    configs = [
        config_of({"pipeline": 2}, schedule_of("interleaved", 2), groups * 2) for groups in (4, 16)
    ]
    compiled = [build(config, build_mesh(dict(config.mesh))).compiled for config in configs]
    modules = [hlo.parse(one.as_text()) for one in compiled]
    size, larger = (sum(map(len, module.computations.values())) for module in modules)
    assert larger == size
    held = [memory_bytes(one) for one in compiled]
    # The numbers of all microbatches, and how the allocator aligns buffers.
    assert held[1]["temp"] == pytest.approx(held[0]["temp"], rel=0.01)
    wanted = state_memory(layout_of(configs[0]))
    assert [one["alias"] for one in held] == [wanted.state] * 2


@pytest.mark.matrix
def test_temporary_memory_grows_by_what_waits_for_its_backward():
    """GPipe keeps all microbatches: slots, and what the first and the last part hold of each.

    In FP32: XLA:CPU makes an FP32 copy of a bf16 array to update a slice of it.
    """
    configs = [
        config_of(
            {"pipeline": 2},
            schedule_of("gpipe"),
            microbatches,
            model={"num_dense_layers": 7, "dtype": "float32"},
        )
        for microbatches in (4, 12)
    ]
    few, many = (
        memory_bytes(build(config, build_mesh(dict(config.mesh))).compiled)["temp"]
        for config in configs
    )
    fewer, more = (traced(config).waiting_bytes for config in configs)
    assert many - few == pytest.approx(more - fewer, rel=0.01)
    sizes = [slots.slot_bytes(layout_of(config)) for config in configs]
    assert sizes[1] - sizes[0] > 0.8 * (more - fewer)
