"""Steps of a pipeline against one device without collectives: gradients, losses, counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.config.records import WindowConfig
from olmo_jax.inspect import jaxpr
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.parallel.pipeline import setup as machines
from olmo_jax.parallel.pipeline import ticks
from olmo_jax.rules.validation import violations
from olmo_jax.train.program import build
from tests import cases
from tests.parallel.pipeline.test_executor import poisoned
from tests.parallel.test_agreement import (
    AUXILIARY_X1000,
    BATCH,
    FSDP,
    ROUNDING,
    assert_replicas_agree,
    check_steps,
    first_step,
)
from tests.train.test_precision import step_from
from tests.train.test_step import smallest_margin

matrix = pytest.mark.matrix


def config_of(mesh, chunks=1, layers=6, *, parallel=(), model=(), **others):
    """Return a config whose body has `layers - 1` routed layers, behind a dense one."""
    config = cases.tiny(
        mesh,
        parallel={"pipeline_chunks": chunks, **dict(parallel)},
        model={"num_layers": layers, **dict(model)},
        **others,
    )
    broken = [text for text in violations(config) if "data.sources" not in text]
    assert not broken, broken
    return config


def wanted(program, batch, **blocks):
    shapes = program.layout.expert_biases
    bias = {name: np.zeros(leaf.shape, np.float32) for name, leaf in shapes.items()}
    params = {**cases.weights_of(program), **bias}
    return cases.oracle(program.config, params, batch, **blocks)


def check(program, **blocks):
    """Compare a first step with one device's, leaf by leaf."""
    config = program.config
    batch = cases.Batch(*(value[: config.train.global_batch] for value in BATCH))
    state, metrics, gradients = first_step(program, batch)
    parts, counts, expected = wanted(program, batch, **blocks)
    # Rounding grows with depth: 1.3e-5 was measured for a gain below 13 layers.
    bound = ROUNDING if config.model.num_layers < 10 else 2 * ROUNDING
    cases.assert_close(gradients, expected, bound)
    values = {"loss": parts.cross_entropy, "z_loss": parts.z, "grad_norm": cases.norm_of(expected)}
    if layers := config.model.num_routed_layers:
        values |= {
            "balance_loss": parts.balance / layers,
            "router_z_loss": parts.router_z / layers,
            "expert_counts": counts,
            "max_load": (counts.max(-1) / counts.mean(-1)).max(),
        }
    chex.assert_trees_all_close({name: metrics[name] for name in values}, values, rtol=ROUNDING)
    assert metrics["tokens"] == batch.padding_mask.sum()
    assert (metrics["drop_rate"], metrics["skipped"], metrics["stop"]) == (0, 0, 0)
    return state, metrics, gradients


WITH_EXPERTS = config_of({"pipeline": 2, "data": 2, "expert": 2}, 2, router=AUXILIARY_X1000)
"""Four stages of two places, of which three are empty; 4 microbatches; heavy router losses."""

WITH_FSDP = config_of({"pipeline": 4, "fsdp": 2}, parallel=FSDP, model={"tie_embeddings": True})
"""Four stages of two places, a rank of them empty but for one layer; a tied embedding."""


@pytest.fixture(scope="module")
def with_experts(program_of):
    """Return a step's program, and what it gave."""
    program = program_of(WITH_EXPERTS)
    return program, check(program)


def test_a_step_with_experts_data_and_empty_places_is_one_devices(with_experts):
    program, (state, metrics, _) = with_experts
    # One move of each layer's bias, by the counts of all its microbatches.
    counts = metrics["expert_counts"].astype(np.float64)
    moved = 0.01 * np.sign(counts.mean(axis=1, keepdims=True) - counts)
    bias = np.array(state.expert_bias[cases.EXPERT_BIAS])
    np.testing.assert_allclose(bias, moved, atol=1e-7)
    # Weights that no layer has stay zero, through decay too.
    for leaves in (state.main, state.opt_state.mu, state.opt_state.nu):
        cases.unstaged(program, leaves)


def test_every_rank_has_the_same_metrics_and_state(with_experts):
    program, _ = with_experts
    state = cases.state_of(program, cases.weights_of(program))
    state, metrics = program.step(state, program.put(BATCH), 1e-3)
    assert_replicas_agree((metrics, state))
    assert all(len(leaf.addressable_shards) == 8 for leaf in metrics.values())


def test_evaluation_is_the_training_loss_and_changes_nothing(with_experts):
    program, (_, metrics, _) = with_experts
    state = cases.state_of(program, cases.weights_of(program))
    before = cases.host(state)
    found = cases.host(program.evaluate(state, program.put(BATCH)))
    mean = found["ce_sum"] / found["loss_tokens"]
    np.testing.assert_allclose(mean, metrics["loss"], rtol=1e-6)
    chex.assert_trees_all_equal(cases.host(state), before)


@matrix
def test_a_step_of_fsdp_with_a_tied_embedding_is_one_devices(program_of):
    check(program_of(WITH_FSDP))


@pytest.mark.parametrize(
    "mesh", [{"pipeline": 3}, pytest.param({"pipeline": 2, "data": 2}, marks=matrix)], ids=str
)
def test_a_checkpoint_has_the_layers_in_order(mesh, program_of):
    """Over three ranks no width divides: there every rank has all layers for a while."""
    program = program_of(config_of(mesh, 2, 8, global_batch=12 if "data" in mesh else 6))
    weights = cases.weights_of(program)
    state = cases.state_of(program, weights)
    stored = cases.host(program.stored(state).main)
    found = cases.host(program.restored(program.stored(state)).main)
    chex.assert_trees_all_equal(stored, weights)
    chex.assert_trees_all_equal(found, cases.host(state.main))


@matrix
def test_the_first_weights_do_not_depend_on_stages(program_of):
    config = config_of({"pipeline": 2, "data": 2, "expert": 2}, 2, router=AUXILIARY_X1000)
    staged, plain = program_of(config), program_of(config_of({}))
    ours = cases.unstaged(staged, staged.init().main)
    chex.assert_trees_all_equal(ours, cases.host(plain.init().main))


MESHES = {
    "p2": ({"pipeline": 2}, {}),
    "p4": ({"pipeline": 4}, {}),
    "p2_e2": ({"pipeline": 2, "expert": 2}, {}),
    "p2_d2": ({"pipeline": 2, "data": 2}, {}),
    "p2_f2": ({"pipeline": 2, "fsdp": 2}, {"parallel": FSDP}),
    "p4_e2": ({"pipeline": 4, "expert": 2}, {}),
    "p4_d2": ({"pipeline": 4, "data": 2}, {}),
    "p4_f2": ({"pipeline": 4, "fsdp": 2}, {"parallel": FSDP}),
}
CHUNKS = [(mesh, chunks) for mesh in MESHES for chunks in (1, 2, 3)]


@matrix
@pytest.mark.parametrize(("mesh", "chunks"), CHUNKS, ids=str)
def test_every_mesh_and_number_of_chunks_gives_one_devices_step(mesh, chunks):
    sizes, others = MESHES[mesh]
    # 13 layers over 4 x 3 stages leave 12 of 24 places empty, and whole stages with them.
    layers = 14 if (sizes["pipeline"], chunks) == (4, 3) else 9
    config = config_of(sizes, chunks, layers, router=AUXILIARY_X1000, **others)
    check(build_here(config))


OTHERS = {
    "hsdp_experts": ({"pipeline": 2, "data": 2, "fsdp": 2}, {"parallel": FSDP}),
    "fsdp_experts": ({"pipeline": 2, "fsdp": 2, "expert": 2}, {"parallel": FSDP}),
    "gathered_once": (
        {"pipeline": 2, "fsdp": 2, "expert": 2},
        {"parallel": {**FSDP, "reshard": "step"}},
    ),
    "replicated": ({"pipeline": 2, "data": 2}, {"shard_optimizer": False}),
    "gpipe": (
        {"pipeline": 2, "expert": 2},
        {"parallel": {"pipeline_schedule": "gpipe"}, "chunks": 2},
    ),
    # Biases make something of nothing: an empty place would get a gradient.
    "biases_and_empty_places": (
        {"pipeline": 2, "data": 2},
        {
            "chunks": 2,
            "model": {"attention_bias": True},
            "router": {"bias": True, "z_weight": 0.2},
        },
    ),
    "three_ranks": ({"pipeline": 3}, {"global_batch": 12, "layers": 5}),
    "leading_routed_block": (
        {"pipeline": 2},
        {"model": {"num_dense_layers": 0, "windows": WindowConfig(pattern=(4, -1))}, "layers": 7},
    ),
    "names": (
        {"pipeline": 2, "fsdp": 2},
        {
            "parallel": FSDP,
            "train": {"recompute": ("query", "expert_hidden", "head_normaliser")},
            "model": {"tie_embeddings": True},
        },
    ),
    "groups_of_one": ({"pipeline": 4, "data": 2}, {"microbatch": 2, "global_batch": 16}),
    "block": ({"pipeline": 2, "expert": 2}, {"train": {"recompute": "block"}}),
    "windows": (
        {"pipeline": 2, "data": 2},
        {"model": {"windows": WindowConfig(pattern=(4, -1))}, "layers": 7},
    ),
    "dense": (
        {"pipeline": 2, "data": 2},
        {"model": {"num_dense_layers": 6}, "router": {"bias_gamma": None}},
    ),
    "no_leading_block": ({"pipeline": 2}, {"model": {"num_dense_layers": 0}}),
    "other_leaves": (
        {"pipeline": 2, "fsdp": 2},
        {
            "model": {
                "attention_bias": True,
                "attention_gate": "elementwise",
                "qk_norm": "full",
                "num_dense_layers": 2,
            },
            "parallel": FSDP,
        },
    ),
}

EVALUATED = ("windows", "gathered_once", "dense", "other_leaves")


@matrix
@pytest.mark.parametrize("name", OTHERS)
def test_what_else_a_pipeline_goes_with_gives_one_devices_step(name):
    mesh, others = OTHERS[name]
    program = build_here(config_of(mesh, **others))
    _, metrics, _ = check(program)
    if name in EVALUATED:
        state = cases.state_of(program, cases.weights_of(program))
        found = cases.host(program.evaluate(state, program.put(BATCH)))
        mean = found["ce_sum"] / found["loss_tokens"]
        np.testing.assert_allclose(mean, metrics["loss"], rtol=1e-6)


@matrix
def test_learned_routes_give_one_devices_gradients(monkeypatch):
    router = {**AUXILIARY_X1000, "assignment": "learned"}
    program = build_here(config_of({"pipeline": 2, "expert": 2}, 2, router=router))
    params = cases.weights_of(program)
    bias = {name: np.zeros(leaf.shape, "f4") for name, leaf in program.layout.expert_biases.items()}
    assert smallest_margin(program.config, params | bias, BATCH, monkeypatch) > 1e-5
    check(program)


@matrix
def test_bf16_gradients_are_those_without_a_pipeline():
    """Both are as far from FP32, 0.096 at worst: sums of bf16 roundings, in the same order."""
    batch, found = cases.unkind_batch(0, rows=32), []
    for mesh, chunks in (({"data": 1}, 1), ({"pipeline": 2, "expert": 2}, 2)):
        settings = {"global_batch": 32, "model": {"dtype": "bfloat16"}}
        program = build_here(config_of(mesh, chunks, **settings))
        found.append(step_from(program, cases.weights_of(program), batch))
    alone, staged = found
    cases.assert_close(staged, alone, 1e-3)


def test_a_step_branches_nowhere_and_adds_no_float_to_a_place_twice(with_experts):
    program, _ = with_experts
    step = jaxpr.live(program.jitted.trace(*program.abstract_arguments()).jaxpr)
    assert jaxpr.conditionals(step) == jaxpr.unbounded_loops(step) == []
    assert jaxpr.scatter_adds(step) == jaxpr.callbacks(step) == []


@matrix
def test_a_balance_loss_of_a_microbatch_is_one_devices():
    router = {"balance_scope": "microbatch", "balance_weight": 5.0}
    config = config_of({"pipeline": 2, "data": 2}, microbatch=2, router=router)
    check(build_here(config), num_blocks=8)


def build_here(config):
    """Return a program that no other test asks for: it is given up after its test."""
    return build(config, build_mesh(dict(config.mesh)))


@matrix
@pytest.mark.parametrize("poison", [float("nan"), 1e4], ids=str)
def test_what_idle_ranks_hold_and_send_changes_nothing(poison, with_experts, monkeypatch):
    zeros = machines.zeros

    def blank(shapes, *leading):
        """Return places full of poison. Its integers are the data's, which idle ranks share."""
        return jax.tree.map(
            lambda leaf: (
                leaf + jnp.asarray(poison, leaf.dtype)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
            ),
            zeros(shapes, *leading),
        )

    monkeypatch.setattr(machines, "blank", blank)
    monkeypatch.setattr(ticks, "_forward", poisoned(ticks._forward, poison))
    monkeypatch.setattr(ticks, "_backward", poisoned(ticks._backward, poison))
    _, metrics, gradients = first_step(build_here(WITH_EXPERTS))
    _, (_, clean, expected) = with_experts
    chex.assert_trees_all_equal(metrics, clean)
    chex.assert_trees_all_equal(gradients, expected)


@matrix
@pytest.mark.parametrize("others", [{}, {"parallel": FSDP}], ids=["ddp", "fsdp"])
def test_five_steps_are_those_of_a_plain_loop(others):
    mesh = {"pipeline": 2, "fsdp": 2, "expert": 2}
    check_steps(build_here(config_of(mesh, 2, **others)), [1e-3, 2e-3, 3e-3, 2e-3, 1e-3])
