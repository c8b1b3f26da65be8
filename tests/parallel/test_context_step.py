"""Whole steps with rows over several ranks: one device's gradients, losses, counts, evaluation.

Rows of 23 positions divide by no number of ranks; documents cross the edges; 2 key heads are fewer
than 4 ranks.
"""

from functools import cache

import chex
import numpy as np
import pytest

from olmo_jax.arch.labels import IGNORED
from olmo_jax.arch.sizes import padded_length
from olmo_jax.config.records import WindowConfig
from olmo_jax.data.sequence_layout import lay_out
from olmo_jax.inspect import jaxpr
from tests import cases
from tests.parallel.test_agreement import (
    AUXILIARY_X1000,
    BATCH,
    ROUNDING,
    assert_replicas_agree,
    check_steps,
    first_step,
)
from tests.train.test_precision import check_against_fp32
from tests.train.test_step import smallest_margin

RING, FOLDED, FSDP = {"context": "ring"}, {"fold_sequence": True}, {"method": "fsdp"}
WINDOWS = {"num_layers": 5, "windows": WindowConfig(pattern=(4, -1))}
EXTRAS = {"attention_bias": True, "attention_gate": "elementwise", "scalable_softmax": True}


def case(mesh, parallel=None, **others):
    return cases.tiny(mesh, parallel=parallel, **({"router": AUXILIARY_X1000} | others))


ULYSSES = case({"expert": 2, "sequence": 4}, FOLDED, microbatch=2, model=WINDOWS)
"""8 ranks share the experts, 4 of them 4 heads and 2 key heads; windows, half of the layers."""

A_RING = case({"fsdp": 2, "expert": 2, "sequence": 2}, RING | FSDP, microbatch=2, model=WINDOWS)
"""Every leaf sharded over all ranks; the experts over 2."""

QUICK = "ulysses4_expert2_folded"
BOTH = [QUICK, pytest.param("ring2_fsdp2_expert2", marks=pytest.mark.matrix)]

CASES = {
    QUICK: ULYSSES,
    "ring2_fsdp2_expert2": A_RING,
    "ulysses2": case({"sequence": 2}, microbatch=4),
    "ulysses4_data2": case({"data": 2, "sequence": 4}, microbatch=2, model=EXTRAS),
    "ulysses2_expert2_folded_hsdp": case(
        {"data": 2, "expert": 2, "sequence": 2}, FOLDED | FSDP | {"reshard": "after_backward"}
    ),
    "ulysses2_attention_recomputed_hsdp": case(
        {"data": 2, "fsdp": 2, "sequence": 2}, FSDP, train={"recompute": "attention"}
    ),
    "ring4_data2_windows_recomputed": case(
        {"data": 2, "sequence": 4}, RING, microbatch=2, model=WINDOWS, train={"recompute": "block"}
    ),
    "ring4_attention_recomputed_kept_for_the_step": case(
        {"fsdp": 2, "sequence": 4},
        RING | FSDP | {"reshard": "step"},
        train={"recompute": "attention"},
    ),
    "pipeline2_ulysses2_expert2_folded": case(
        {"pipeline": 2, "expert": 2, "sequence": 2}, FOLDED, microbatch=2, model=WINDOWS
    ),
    "pipeline2_ring2_hsdp_empty_place": case(
        {"pipeline": 2, "fsdp": 2, "sequence": 2},
        RING | FSDP,
        microbatch=2,
        model={"num_layers": 4},
    ),
    "ulysses2_uniform_routes": case(
        {"expert": 2, "sequence": 2}, FOLDED, router={"assignment": "uniform"}
    ),
    "ring2_jitter": case({"expert": 2, "sequence": 2}, RING, router={"jitter_eps": 0.1}),
    "ulysses2_counts_of_all_ranks": case(
        {"data": 2, "sequence": 2},
        router={"balance_scope": "global", "balance_weight": 5.0},
        train={"recompute": "block"},
    ),
}


@pytest.fixture(scope="module")
def steps(program_of):
    return cache(lambda config: first_step(program_of(config)))


def bias_of(program):
    return {name: np.zeros(b.shape, np.float32) for name, b in program.layout.expert_biases.items()}


def one_device(program, batch=BATCH):
    config = program.config
    scope = config.model.router.balance_scope
    blocks = program.layout.num_microbatches if scope == "global" else 1
    params = {**cases.weights_of(program), **bias_of(program)}
    return cases.oracle(config, params, batch, num_blocks=blocks)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == QUICK else pytest.mark.matrix) for name in CASES],
)
def test_gradients_and_metrics_of_a_step_are_one_devices(name, program_of, steps):
    config = CASES[name]
    _, metrics, gradients = steps(config)
    parts, counts, expected = one_device(program_of(config))
    cases.assert_close(gradients, expected, ROUNDING)
    layers = config.model.num_routed_layers
    for metric, value in {
        "grad_norm": cases.norm_of(expected),
        "loss": parts.cross_entropy,
        "z_loss": parts.z,
        "balance_loss": parts.balance / layers,
        "router_z_loss": parts.router_z / layers,
    }.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=ROUNDING, err_msg=metric)
    np.testing.assert_array_equal(metrics["expert_counts"], counts)
    assert metrics["tokens"] == BATCH.padding_mask.sum()
    assert metrics["drop_rate"] == 0


@pytest.mark.parametrize("name", BOTH)
def test_three_steps_are_those_of_a_plain_loop(name, program_of):
    check_steps(program_of(CASES[name]), [1e-3, 2e-3, 3e-3])


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [FOLDED, RING], ids=["ulysses_folded", "ring"])
def test_learned_routes_give_one_devices_gradients(parallel, program_of, monkeypatch):
    mesh, router = {"expert": 2, "sequence": 2}, AUXILIARY_X1000 | {"assignment": "learned"}
    program = program_of(case(mesh, parallel, microbatch=4, router=router))
    params = {**cases.weights_of(program), **bias_of(program)}
    assert smallest_margin(program.config, params, BATCH, monkeypatch) > 1e-5
    _, metrics, gradients = first_step(program)
    _, counts, expected = one_device(program)
    np.testing.assert_array_equal(metrics["expert_counts"], counts)
    cases.assert_close(gradients, expected, ROUNDING)


@pytest.mark.parametrize("name", BOTH)
def test_the_gradient_norm_is_one_number_that_counts_each_element_once(name, program_of, steps):
    state, metrics, gradients = steps(CASES[name])
    np.testing.assert_allclose(metrics["grad_norm"], cases.norm_of(gradients), rtol=1e-6)
    assert_replicas_agree(state)


@pytest.mark.parametrize("name", BOTH)
def test_values_of_padding_change_nothing(name, program_of, steps):
    """Neither those of a row's end nor those that fill it up to equal pieces."""
    state, metrics, _ = steps(CASES[name])
    again, same, _ = first_step(program_of(CASES[name]), cases.scramble_padding(BATCH, 5))
    chex.assert_trees_all_equal(metrics, same)
    chex.assert_trees_all_equal(cases.host(state), cases.host(again))


@pytest.mark.parametrize(
    "name",
    [
        *BOTH,
        pytest.param("pipeline2_ulysses2_expert2_folded", marks=pytest.mark.matrix),
    ],
)
def test_an_evaluation_is_the_training_loss_without_drops(name, program_of):
    program = program_of(CASES[name])
    state = cases.state_of(program, cases.weights_of(program))
    parts = cases.host(program.evaluate(state, program.put(BATCH)))
    expected = one_device(program)[0]
    np.testing.assert_allclose(
        parts["ce_sum"] / parts["loss_tokens"], expected.cross_entropy, rtol=1e-5
    )
    assert parts["loss_tokens"] == ((BATCH.labels != IGNORED) & BATCH.padding_mask).sum()


@pytest.mark.parametrize("name", BOTH)
def test_a_step_branches_nowhere_and_adds_no_float_to_a_place_twice(name, program_of):
    program = program_of(CASES[name])
    step = jaxpr.live(program.jitted.trace(*program.abstract_arguments()).jaxpr)
    assert jaxpr.conditionals(step) == jaxpr.unbounded_loops(step) == []
    assert jaxpr.scatter_adds(step) == jaxpr.callbacks(step) == []


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [FOLDED, RING], ids=["ulysses_folded", "ring"])
def test_bf16_gradients_are_as_close_to_fp32_as_those_of_whole_rows(parallel, program_of):
    """As close as `tests/train/test_precision.py` has it for eight devices and for one."""
    config = cases.tiny(
        {"expert": 2, "sequence": 4},
        parallel=parallel,
        global_batch=32,
        model={"dtype": "bfloat16"},
    )
    check_against_fp32(program_of(config), cases.unkind_batch(0, rows=32), 0.06)


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [23, 24, 48])
def test_tokens_labels_positions_ids_and_masks_are_divided_alike(context, num_ranks, length):
    """Every position goes to one rank with all that belongs to it; what is added is padding."""
    batch = cases.unkind_batch(1, length=length)
    laid_out = lay_out(batch, context, num_ranks)
    assert laid_out.tokens.shape[1] == padded_length(length, context, num_ranks)
    added = laid_out.segment_ids == -1
    assert added.sum() == laid_out.tokens.size - batch.tokens.size
    assert not laid_out.padding_mask[added].any()
    assert (laid_out.labels[added] == IGNORED).all()
    fields = ("tokens", "labels", "segment_ids", "positions", "padding_mask")
    for row in range(len(batch.tokens)):
        before, after = (
            np.stack([np.asarray(getattr(b, name)[row]) for name in fields])
            for b in (batch, laid_out)
        )
        kept = after[:, ~added[row]]
        np.testing.assert_array_equal(
            kept[:, np.lexsort(kept[::-1])], before[:, np.lexsort(before[::-1])]
        )
    np.testing.assert_array_equal(laid_out.sequence, batch.sequence)
