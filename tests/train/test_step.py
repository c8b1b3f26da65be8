"""One compiled step with learned routes: any routing, dropping, evaluation, steps not taken."""

import chex
import jax
import numpy as np
import pytest

from olmo_jax.arch.sizes import capacity
from olmo_jax.model import router
from olmo_jax.model.execution import one_device
from olmo_jax.model.objective import batch_sums
from olmo_jax.model.transformer import by_period
from olmo_jax.train.program import Program
from olmo_jax.train.step import train_step
from tests import cases

ROUNDING = 1e-5
BATCH = cases.unkind_batch(0)
FACTOR = 2.0
LEARNED = cases.tiny(
    {"data": 2, "expert": 4},
    capacity_factor=FACTOR,
    router={"assignment": "learned"},
    optim={"skip_sigma": 3.0, "skip_window": 8},
)
NO_BIAS = np.zeros((2, 8), np.float32)


def pushed(**pushes):
    """Return a router bias that pushes experts (`e3=-10`) in every layer."""
    bias = NO_BIAS.copy()
    for name, push in pushes.items():
        bias[:, int(name[1:])] = push
    return bias


@pytest.fixture(scope="module")
def program(program_of):
    return program_of(LEARNED)


def state_with(program, bias=NO_BIAS, **others):
    main = others.pop("main", cases.weights_of(program))
    return cases.state_of(program, main, expert_bias={cases.EXPERT_BIAS: bias}, **others)


def take(program, state, batch=BATCH):
    state, metrics = program.step(state, program.put(batch), 1e-3)
    return state, cases.host(metrics)


def params_of(program, bias):
    return {**cases.weights_of(program), cases.EXPERT_BIAS: bias}


def smallest_margin(config, params, batch, monkeypatch):
    """Return the least distance between the last chosen and the first refused expert."""
    margins, select = [], router._select

    def recorded(scores, logits, score_bias, settings, top_k):
        ranked = -np.sort(-np.asarray(scores + score_bias), axis=-1)
        margins.append((ranked[..., top_k - 1] - ranked[..., top_k])[batch.padding_mask].min())
        return select(scores, logits, score_bias, settings, top_k)

    arrays = type(batch)(*map(jax.numpy.asarray, batch))
    params = by_period(config.model, jax.tree.map(jax.numpy.asarray, params))
    with monkeypatch.context() as patched, jax.disable_jit():
        patched.setattr(router, "_select", recorded)
        execution = one_device(training=True)
        batch_sums(config, params, arrays, execution, jax.numpy.int32(0))
    assert len(margins) == config.model.num_routed_layers
    return min(margins)


EMPTY_EXPERT = pushed(e3=-10.0)


def test_learned_routes_give_one_devices_gradients_leaf_by_leaf(program, monkeypatch):
    params = params_of(program, EMPTY_EXPERT)
    assert smallest_margin(program.config, params, BATCH, monkeypatch) > 1e-5
    parts, counts, gradients = cases.oracle(program.config, params, BATCH)
    state, metrics = take(program, state_with(program, EMPTY_EXPERT))
    assert metrics["drop_rate"] == 0
    np.testing.assert_array_equal(metrics["expert_counts"], counts)
    assert (counts[:, 3] == 0).all()
    np.testing.assert_allclose(metrics["loss"], parts.cross_entropy, rtol=ROUNDING)
    found = cases.gradients_of(program, state, metrics["grad_norm"])
    cases.assert_close(found, gradients, ROUNDING)
    for name in ("embedding.weight", "leading.0.attention.q"):
        assert np.linalg.norm(gradients[name]) > 1e-3
    assert (found["body.moe.experts.down"][:, 3] == 0).all()


def dropped_by_numpy(config, chosen):
    """Count drops if every real token chooses `chosen`: per microbatch, group and rank."""
    ranks, num_local = config.mesh.expert, config.model.num_experts // config.mesh.expert
    limit = capacity(FACTOR, config.train.microbatch * cases.LENGTH, len(chosen))
    dropped = 0
    for rows in np.split(BATCH.padding_mask, len(BATCH.padding_mask) // ranks):
        wanted = np.bincount([e // num_local for e in chosen], minlength=ranks) * rows.sum()
        dropped += np.maximum(wanted - limit, 0).sum()
    return int(dropped)


# Experts 0 and 1 live on one rank, experts 0 and 2 on two.
SKEWED = {(0, 1): pushed(e0=20.0, e1=10.0), (0, 2): pushed(e0=20.0, e2=10.0)}


def test_one_compiled_program_takes_any_routing(program, monkeypatch):
    once = chex.assert_max_traces(train_step, n=1)
    monkeypatch.setattr("olmo_jax.train.program.train_step", once)
    program = Program(program.config, program.mesh)
    states = [state_with(program, bias) for bias in (NO_BIAS, EMPTY_EXPERT, *SKEWED.values())]
    batch = program.put(BATCH)
    results = [program.step(state, batch, 1e-3)[1] for state in states]
    spread, _, *skewed = cases.host(results)
    assert spread["drop_rate"] == 0
    routes = 2 * BATCH.padding_mask.sum()
    for chosen, metrics in zip(SKEWED, skewed, strict=True):
        wanted = np.zeros((2, 8))
        wanted[:, chosen] = BATCH.padding_mask.sum()
        np.testing.assert_array_equal(metrics["expert_counts"], wanted)
        assert metrics["max_load"] == 4
        dropped = dropped_by_numpy(program.config, chosen)
        np.testing.assert_allclose(metrics["drop_rate"], dropped / routes, rtol=1e-6)
        assert np.isfinite(metrics["grad_norm"])
    assert skewed[0]["drop_rate"] > 0.4
    assert skewed[1]["drop_rate"] == 0


def test_evaluation_is_the_training_loss_when_nothing_drops_and_changes_nothing(program):
    state = state_with(program)
    before, batch = cases.host(state), program.put(BATCH)
    parts = cases.host(program.evaluate(state, batch))
    chex.assert_trees_all_equal(before, cases.host(state))
    _, metrics = take(program, state)
    assert metrics["drop_rate"] == 0
    assert parts["loss_tokens"] == ((BATCH.labels != -100) & BATCH.padding_mask).sum()
    np.testing.assert_allclose(parts["ce_sum"] / parts["loss_tokens"], metrics["loss"], rtol=1e-6)


def test_evaluation_drops_nothing_where_training_would(program):
    bias = SKEWED[0, 1]
    state = state_with(program, bias)
    parts = cases.host(program.evaluate(state, program.put(BATCH)))
    _, metrics = take(program, state)
    wanted, _, _ = cases.oracle(program.config, params_of(program, bias), BATCH)
    mean = parts["ce_sum"] / parts["loss_tokens"]
    np.testing.assert_allclose(mean, wanted.cross_entropy, rtol=1e-6)
    assert metrics["drop_rate"] > 0.4
    assert abs(metrics["loss"] - mean) > 1e-4


def test_a_step_that_is_not_finite_changes_nothing_but_its_number(program):
    main = cases.weights_of(program)
    main["head.weight"][0, 0] = np.inf
    state = state_with(program, main=main)
    before = cases.host(state)
    state, metrics = take(program, state)
    assert not np.isfinite(metrics["loss"])
    assert metrics["skipped"] == 1
    after = cases.host(state)
    chex.assert_trees_all_equal(before._replace(step=np.int32(1)), after)


def test_a_refused_step_keeps_the_weights_but_moves_router_bias_and_history(program):
    usual = np.linspace(0.9, 1.1, 8, dtype=np.float32)
    history = {"losses": usual, "grad_norms": 100 * usual, "size": np.int32(8)}
    state = state_with(program, history=history)
    before = cases.host(state)
    state, metrics = take(program, state)
    after = cases.host(state)
    assert metrics["skipped"] == 1
    for part in ("weights", "main", "opt_state"):
        chex.assert_trees_all_equal(getattr(before, part), getattr(after, part))
    counts = metrics["expert_counts"]
    moved = np.sign(counts.mean(-1, keepdims=True) - counts) * np.float32(0.01)
    chex.assert_trees_all_equal(after.expert_bias, {cases.EXPERT_BIAS: moved.astype(np.float32)})
    chex.assert_trees_all_equal(after.history["losses"], np.append(usual[1:], metrics["loss"]))
    chex.assert_trees_all_equal(
        after.history["grad_norms"], np.append(100 * usual[1:], metrics["grad_norm"])
    )
    assert (after.step, after.opt_state.count) == (1, 0)


def test_a_usual_step_is_taken_and_remembered(program):
    state, metrics = take(program, state_with(program))
    after = cases.host(state)
    assert metrics["skipped"] == 0
    assert (after.step, after.opt_state.count, after.history["size"]) == (1, 1, 1)
    assert after.history["losses"][-1] == metrics["loss"]
    assert (after.main["head.weight"] != cases.weights_of(program)["head.weight"]).mean() > 0.9


def test_a_stop_signal_of_one_rank_reaches_all(program):
    batch, rate = program.put(BATCH), np.float32(0)
    for flags in np.eye(8, dtype=np.int32)[[0, 5]]:
        assert program.compiled(state_with(program), batch, rate, flags)[1]["stop"] == 1
    assert program.step(state_with(program), batch, 0.0, stop=True)[1]["stop"] == 1
    assert program.step(state_with(program), batch, 0.0)[1]["stop"] == 0
