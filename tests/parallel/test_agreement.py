"""The step on a mesh against one device without collectives: gradients, losses, metrics, counts."""

import math
from functools import cache

import chex
import jax
import numpy as np
import pytest

from olmo_jax.config.records import WindowConfig
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.model.objective import objective
from olmo_jax.model.router import forced_experts
from olmo_jax.train import step
from olmo_jax.train.program import build
from tests import cases

# FP32 sums in another order: 1e-6 was measured, on any mesh.
ROUNDING = 1e-5
BATCH = cases.unkind_batch(0)
AUXILIARY_X1000 = {"balance_weight": 5.0, "z_weight": 0.2}

DENSE_AND_EXPERTS = cases.tiny({"data": 2, "fsdp": 2, "expert": 2}, router=AUXILIARY_X1000)
"""8 devices along three axes, 2 microbatches, distributed optimizer, heavy router losses."""

REPLICATED = cases.tiny({"expert": 2}, microbatch=2, shard_optimizer=False)
"""2 devices, 4 microbatches of 2 rows a device, every rank with the whole optimizer state."""

FSDP = {"method": "fsdp"}
HYBRID = cases.tiny({"data": 2, "fsdp": 2, "expert": 2}, router=AUXILIARY_X1000, parallel=FSDP)
"""HSDP with experts: groups of 4 shard every leaf, twice; a unit is gathered for each use."""

GATHERED_ONCE = cases.tiny({"fsdp": 2}, microbatch=2, parallel=FSDP | {"reshard": "step"})
KEPT_FOR_BACKWARD = cases.tiny(
    {"expert": 2}, microbatch=4, parallel=FSDP | {"reshard": "after_backward"}
)

BOTH_METHODS = (DENSE_AND_EXPERTS, REPLICATED, HYBRID)

MESHES = [
    {"data": 1},
    {"data": 2},
    {"expert": 2},
    {"fsdp": 2},
    {"data": 4},
    {"expert": 4},
    {"data": 2, "expert": 2},
    {"fsdp": 2, "expert": 2},
    {"data": 2, "fsdp": 2},
    {"data": 8},
    {"fsdp": 8},
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"data": 4, "expert": 2},
    {"fsdp": 4, "expert": 2},
    {"data": 2, "fsdp": 4},
]


def first_step(program, batch=BATCH, **others):
    """Return state, metrics and gradients of one step from weights without structure."""
    state = cases.state_of(program, cases.weights_of(program), **others)
    state, metrics = program.step(state, program.put(batch), 1e-3)
    metrics = cases.host(metrics)
    return state, metrics, cases.gradients_of(program, state, metrics["grad_norm"])


@pytest.fixture(scope="module")
def steps(program_of):
    return cache(lambda config: first_step(program_of(config)))


def wanted(program, batch=BATCH, **kwargs):
    params = cases.weights_of(program)
    bias = np.zeros((2, 8), np.float32)
    return cases.oracle(program.config, {**params, cases.EXPERT_BIAS: bias}, batch, **kwargs)


def check_first_step(program, taken, **kwargs):
    _, metrics, gradients = taken
    parts, counts, expected = wanted(program, **kwargs)
    cases.assert_close(gradients, expected, ROUNDING)
    np.testing.assert_allclose(metrics["grad_norm"], cases.norm_of(expected), rtol=ROUNDING)
    layers = program.config.model.num_routed_layers
    for name, value in {
        "loss": parts.cross_entropy,
        "z_loss": parts.z,
        "balance_loss": parts.balance / layers,
        "router_z_loss": parts.router_z / layers,
        "expert_counts": counts,
        "max_load": (counts.max(-1) / counts.mean(-1)).max(),
    }.items():
        np.testing.assert_allclose(metrics[name], value, rtol=ROUNDING, err_msg=name)
    assert metrics["tokens"] == BATCH.padding_mask.sum()
    assert (metrics["drop_rate"], metrics["skipped"], metrics["stop"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "config",
    [DENSE_AND_EXPERTS, REPLICATED, HYBRID, GATHERED_ONCE, KEPT_FOR_BACKWARD],
    ids=["data2_fsdp2_expert2", "expert2_replicated", "hsdp_expert2", "step", "after_backward"],
)
def test_gradients_and_metrics_of_a_step_are_one_devices(config, program_of, steps):
    check_first_step(program_of(config), steps(config))


def test_the_oracle_is_the_public_objective(program_of):
    program = program_of(DENSE_AND_EXPERTS)
    parts, _, _ = wanted(program)
    params = {**cases.weights_of(program), cases.EXPERT_BIAS: np.zeros((2, 8), np.float32)}
    _, public = jax.jit(lambda params: objective(program.config, params, BATCH))(params)
    np.testing.assert_allclose(parts, public, rtol=ROUNDING)


def on_meshes(meshes, first, *others):
    """Pair every mesh with `first`, and those of four devices with each of the `others` too."""
    pairs = [(mesh, first) for mesh in meshes]
    pairs += [(m, other) for m in meshes if math.prod(m.values()) == 4 for other in others]
    names = ["_".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh, _ in pairs]
    ids = [f"{name}-{value}" for name, (_, value) in zip(names, pairs, strict=True)]
    return [pytest.param(*pair, id=name) for pair, name in zip(pairs, ids, strict=True)]


@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "shard_optimizer"), on_meshes(MESHES, True, False))
def test_gradients_and_metrics_agree_on_every_mesh(mesh, shard_optimizer, program_of):
    program = program_of(cases.tiny(mesh, shard_optimizer=shard_optimizer))
    check_first_step(program, first_step(program))


SHARDED_MESHES = [mesh for mesh in MESHES if "fsdp" in mesh or "expert" in mesh]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "reshard"), on_meshes(SHARDED_MESHES, "full", "after_backward", "step")
)
def test_gradients_and_metrics_of_fsdp_agree_on_every_mesh(mesh, reshard, program_of):
    program = program_of(cases.tiny(mesh, parallel=FSDP | {"reshard": reshard}))
    check_first_step(program, first_step(program))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "model",
    [
        {"tie_embeddings": True},
        {"attention_bias": True, "attention_gate": "elementwise", "qk_norm": "full"},
        {"num_dense_layers": 2, "norm": "pre", "shared_hidden": 0},
        {"num_layers": 5, "windows": WindowConfig(pattern=(4, -1))},
    ],
    ids=["tied", "bias_and_gate", "pre_norm", "windows"],
)
@pytest.mark.parametrize("reshard", ["full", "after_backward", "step"])
def test_fsdp_gathers_and_scatters_every_kind_of_leaf(reshard, model, program_of):
    config = cases.tiny(
        {"data": 2, "fsdp": 2, "expert": 2}, model=model, parallel=FSDP | {"reshard": reshard}
    )
    program = program_of(config)
    params = cases.weights_of(program)
    biases = {name: np.zeros(b.shape, "f4") for name, b in program.layout.expert_biases.items()}
    _, metrics, gradients = first_step(program)
    parts, _, expected = cases.oracle(config, {**params, **biases}, BATCH)
    cases.assert_close(gradients, expected, ROUNDING)
    np.testing.assert_allclose(metrics["loss"], parts.cross_entropy, rtol=ROUNDING)


# Upstream of the routed experts: a wrong transpose of dispatch leaves expert gradients right.
UPSTREAM = ["embedding.weight", "leading.0.attention.q", "leading.0.attention.v"]


@pytest.mark.parametrize("name", UPSTREAM)
def test_what_stands_before_the_experts_gets_its_gradient_through_them(name, program_of, steps):
    for config in BOTH_METHODS:
        found, expected = steps(config)[2][name], wanted(program_of(config))[2][name]
        assert np.linalg.norm(expected) > 1e-3
        assert np.linalg.norm(found - expected) <= ROUNDING * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "config",
    [
        DENSE_AND_EXPERTS,
        HYBRID,
        pytest.param(REPLICATED, marks=pytest.mark.matrix),
        pytest.param(GATHERED_ONCE, marks=pytest.mark.matrix),
        pytest.param(KEPT_FOR_BACKWARD, marks=pytest.mark.matrix),
    ],
    ids=["distributed", "hsdp", "replicated", "step", "after_backward"],
)
def test_five_steps_have_the_losses_norms_and_weights_of_a_plain_loop(config, program_of):
    program = program_of(config)
    state = check_steps(program, [1e-3, 2e-3, 3e-3, 2e-3, 1e-3])
    kept = cases.host(state.main) if program.layout.keeps_weights else {}
    cases.assert_close(cases.host(state.weights), kept, 0.0)


def check_steps(program, rates):
    """Take a step at each rate, compare all with a plain loop's, and return the last state."""
    batches = [cases.unkind_batch(seed) for seed in range(len(rates))]
    main = cases.weights_of(program)
    lines, weights = cases.train_on_one_device(program.config, main, batches, rates)
    state = cases.state_of(program, main)
    for batch, rate, line in zip(batches, rates, lines, strict=True):
        state, metrics = program.step(state, program.put(batch), rate)
        chex.assert_trees_all_close({name: metrics[name] for name in line}, line, rtol=ROUNDING)
    cases.assert_close(cases.unstaged(program, state.main), weights, ROUNDING)
    assert_replicas_agree(state)
    return state


def assert_replicas_agree(state):
    for leaf in jax.tree.leaves(state):
        seen = {}
        for shard in leaf.addressable_shards:
            first = seen.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, np.asarray(shard.data))


@pytest.mark.parametrize("config", [DENSE_AND_EXPERTS, HYBRID], ids=["distributed", "hsdp"])
def test_gradient_norm_counts_each_logical_element_once_and_is_one_number(config, program_of):
    program = program_of(config)
    state = cases.state_of(program, cases.weights_of(program))
    state, metrics = program.step(state, program.put(BATCH), 1e-3)
    gradients = cases.gradients_of(program, state, float(metrics["grad_norm"]))
    norm = cases.norm_of(gradients)
    ranks = [float(shard.data) for shard in metrics["grad_norm"].addressable_shards]
    assert len(ranks) == 8
    assert set(ranks) == {ranks[0]}
    np.testing.assert_allclose(ranks[0], norm, rtol=1e-6)


def test_expert_counts_are_a_bincount_over_the_real_tokens_of_the_global_batch(program_of, steps):
    for config in BOTH_METHODS:
        metrics, model = steps(config)[1], config.model
        assert metrics["expert_counts"].dtype == np.int32
        for row, layer in enumerate(range(model.num_dense_layers, model.num_layers)):
            experts = forced_experts(
                "random",
                config.seed,
                0,
                layer,
                jax.numpy.asarray(BATCH.sequence),
                jax.numpy.arange(cases.LENGTH),
                sequence_length=cases.LENGTH,
                num_experts=model.num_experts,
                top_k=model.top_k,
            )
            expected = np.bincount(np.asarray(experts)[BATCH.padding_mask].ravel(), minlength=8)
            np.testing.assert_array_equal(metrics["expert_counts"][row], expected)


def test_router_bias_moves_once_a_step_by_the_counts_of_all_microbatches(program_of, steps):
    for config in BOTH_METHODS:
        assert program_of(config).layout.num_microbatches > 1
        state, metrics, _ = steps(config)
        counts = metrics["expert_counts"].astype(np.float64)
        moved = 0.01 * np.sign(counts.mean(-1, keepdims=True) - counts)
        np.testing.assert_array_equal(
            state.expert_bias[cases.EXPERT_BIAS], moved.astype(np.float32)
        )


@pytest.mark.parametrize("heavy", [DENSE_AND_EXPERTS, HYBRID], ids=["distributed", "hsdp"])
def test_router_losses_enter_the_gradient_in_proportion_to_their_weights(heavy, program_of, steps):
    """Without a label only the router losses are left; 1000 is the ratio of their weights."""
    configs = (heavy, REPLICATED)
    silent = BATCH._replace(labels=np.full_like(BATCH.labels, -100))
    alone = [first_step(program_of(config), silent) for config in configs]
    (_, metrics, heavy), (_, _, light) = alone
    assert metrics["loss"] == 0
    router = "body.moe.router.weight"
    assert np.linalg.norm(light[router]) > 0
    assert np.linalg.norm(heavy["head.weight"]) == 0
    scaled = {name: 1000 * leaf for name, leaf in light.items()}
    cases.assert_close({router: heavy[router]}, {router: scaled[router]}, ROUNDING)
    cases.assert_close(heavy, scaled, 1e-4)
    # What is left of the whole gradient does not depend on the weights.
    whole = [steps(config)[2] for config in configs]
    rest = [
        {name: full[name] - part[name] for name in full}
        for full, part in zip(whole, (heavy, light), strict=True)
    ]
    noise = 1e-6 * np.linalg.norm(whole[0][router])
    assert np.linalg.norm(rest[0][router] - rest[1][router]) < noise + 1e-5 * np.linalg.norm(
        rest[1][router]
    )


def test_values_of_padding_change_nothing(program_of, steps):
    other = cases.scramble_padding(BATCH, 5)
    assert (other.tokens != BATCH.tokens).any()
    for config in BOTH_METHODS:
        state, metrics, _ = steps(config)
        again, same_metrics, _ = first_step(program_of(config), other)
        chex.assert_trees_all_equal(metrics, same_metrics)
        chex.assert_trees_all_equal(cases.host(state), cases.host(again))


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize("router", [{}, AUXILIARY_X1000], ids=["auxiliary", "auxiliary_x1000"])
@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_accumulation_changes_no_gradient(num_microbatches, microbatch, router, method, program_of):
    """One batch of 16 rows over ever fewer ranks; every mesh divides it differently."""
    ranks = cases.ROWS // (num_microbatches * microbatch)
    if ranks > 8:
        mesh, rows = {"data": 4, "expert": 2}, 8
    else:
        mesh, rows = {"data": max(ranks // 2, 1), "expert": min(ranks, 2)}, cases.ROWS
    config = cases.tiny(
        mesh,
        microbatch=microbatch,
        global_batch=rows,
        router=router,
        parallel={"method": method},
    )
    program = program_of(config)
    assert program.layout.num_microbatches == num_microbatches
    batch = cases.Batch(*(value[:rows] for value in BATCH))
    _, _, gradients = first_step(program, batch)
    cases.assert_close(gradients, wanted(program, batch)[2], ROUNDING)


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize("scope", ["instance", "microbatch", "global"])
@pytest.mark.parametrize("key", ["balance_weight", "z_weight"])
def test_a_router_loss_times_ten_changes_its_part_of_the_gradient_by_ten(
    scope, key, method, program_of
):
    mesh = {"data": 2, "expert": 2}
    weights = {"balance_weight": 0.005, "z_weight": 0.02, "balance_scope": scope}
    gradients = {}
    for factor in (0, 1, 10):
        router = weights | {key: weights[key] * factor}
        config = cases.tiny(mesh, router=router, parallel={"method": method})
        program = program_of(config)
        gradients[factor] = first_step(program)[2]["body.moe.router.weight"]
        if factor:
            num_blocks = {"instance": 1, "microbatch": 16, "global": 4}[scope]
            expected = wanted(program, num_blocks=num_blocks)[2]
            cases.assert_close(
                {"router": gradients[factor]},
                {"router": expected["body.moe.router.weight"]},
                ROUNDING,
            )
    once, ten_times = gradients[1] - gradients[0], gradients[10] - gradients[0]
    assert np.linalg.norm(once) > 0
    # The parts are differences of FP32 gradients that may be 100 times larger.
    assert np.linalg.norm(ten_times - 10 * once) < 1e-3 * np.linalg.norm(ten_times)


@pytest.mark.parametrize("value", [np.nan, pytest.param(1e4, marks=pytest.mark.matrix)])
def test_rows_past_the_last_expert_reach_neither_losses_nor_gradients(value, steps, monkeypatch):
    grouped_experts = step.grouped_experts

    def poisoned(pool, rows, group_sizes):
        dead = jax.numpy.arange(rows.shape[0])[:, None] >= group_sizes.sum()
        y = grouped_experts(pool, jax.numpy.where(dead, value, rows), group_sizes)
        return jax.numpy.where(dead, value, y)

    _, metrics, gradients = steps(REPLICATED)
    monkeypatch.setattr(step, "grouped_experts", poisoned)
    program = build(REPLICATED, build_mesh(dict(REPLICATED.mesh)))
    _, same_metrics, same_gradients = first_step(program)
    # Two programs, that may fuse and so round differently.
    cases.assert_close(same_gradients, gradients, 1e-6)
    np.testing.assert_allclose(same_metrics["loss"], metrics["loss"], rtol=1e-6)
