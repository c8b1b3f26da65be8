"""What the backward pass computes again changes no bit of a step, and only what it names."""

import chex
import numpy as np
import pytest

from olmo_jax.arch.activations import ALWAYS_SAVED, GATHERED, NAMES, saved_names
from olmo_jax.inspect import jaxpr as jaxprs
from tests import cases

BATCH = cases.unkind_batch(0)
MESH = {"expert": 2}
NAMED = ("query", "combined", "balance_counts", "head_normaliser")


def config_of(recompute, mesh=MESH, **settings):
    return cases.tiny(mesh, microbatch=4, train={"recompute": recompute}, **settings)


def step_of(program):
    state = cases.state_of(program, cases.weights_of(program))
    state, metrics = program.step(state, program.put(BATCH), 1e-3)
    return cases.host(state), cases.host(metrics)


EXCHANGED = {"exchanged_query", "exchanged_key_value", "exchanged_attention"}
ATTENTION = {"query", "key", "value", "attention_gate", "attention", "attention_logsumexp"}
EXPERTS = {"expert_hidden", "expert_output"}

POLICIES = [
    "block",
    pytest.param("attention", marks=pytest.mark.matrix),
    pytest.param("experts", marks=pytest.mark.matrix),
    pytest.param(NAMED, marks=pytest.mark.matrix, id="named"),
    pytest.param(tuple(NAMES), marks=pytest.mark.matrix, id="everything"),
]


def assert_same(config, other, program_of):
    """Every bit of the state (gradients are in the moments) and of the metrics, counts included."""
    found, wanted = step_of(program_of(config)), step_of(program_of(other))
    assert np.linalg.norm(wanted[0].opt_state.mu["body.attention.q"]) > 0
    chex.assert_trees_all_equal(found, wanted)


@pytest.mark.parametrize("recompute", POLICIES)
def test_a_step_is_the_same_to_the_bit(recompute, program_of):
    assert_same(config_of(recompute), config_of("none"), program_of)


@pytest.mark.matrix
@pytest.mark.parametrize("reshard", ["full", "after_backward", "step"])
@pytest.mark.parametrize("recompute", ["block", "experts"])
def test_a_step_of_fsdp_is_the_same_to_the_bit(recompute, reshard, program_of):
    mesh, parallel = {"data": 2, "fsdp": 2, "expert": 2}, {"method": "fsdp", "reshard": reshard}
    again, at_hand = (
        cases.tiny(mesh, train={"recompute": policy}, parallel=parallel)
        for policy in (recompute, "none")
    )
    assert_same(again, at_hand, program_of)


def sites_of(program, name):
    traced = program.jitted.trace(*program.abstract_arguments())
    return [site for site in jaxprs.equations(traced.jaxpr) if site.name == name]


def names_in(program):
    """Return the names of all results in a step, and of those that backward computes again."""
    sites = sites_of(program, "name")
    again = {site.equation.params["name"] for site in sites if "rematted_computation" in site.scope}
    return {site.equation.params["name"] for site in sites}, again


@pytest.mark.parametrize(("num_layers", "merged"), [(2, {False}), (3, {False, True})])
def test_only_a_loop_over_layers_goes_without_barriers(num_layers, merged, program_of):
    """XLA takes the loop away from a body of one layer, and would then merge both computations."""
    config = cases.tiny(
        {}, model={"num_layers": num_layers}, train={"recompute": "block"}, global_batch=2
    )
    sites = sites_of(program_of(config), "remat2")
    assert {not site.equation.params["prevent_cse"] for site in sites} == merged


EVERY_RESULT = {"attention_gate": "headwise", "num_layers": 3}


def test_every_name_is_that_of_a_result(program_of):
    """A name that nothing has would be kept, or computed again, in vain."""
    config = cases.tiny(
        {"fsdp": 2, "sequence": 2},
        model=EVERY_RESULT,
        router={"assignment": "learned"},
        parallel={"method": "fsdp"},
    )
    found, _ = names_in(program_of(config))
    assert found == {*NAMES, *ALWAYS_SAVED, GATHERED}


@pytest.mark.parametrize(
    ("recompute", "again", "mesh"),
    [
        ("attention", ATTENTION | EXCHANGED, {"sequence": 2}),
        ("experts", EXPERTS, {}),
        (("value",), {"value"}, {}),
    ],
    ids=["attention", "experts", "value"],
)
def test_what_is_computed_again_is_what_the_policy_names(recompute, again, mesh, program_of):
    config = cases.tiny(mesh, model=EVERY_RESULT, train={"recompute": recompute}, global_batch=2)
    _, found = names_in(program_of(config))
    assert found & set(NAMES) == again
    assert saved_names(config) == {*NAMES, *ALWAYS_SAVED} - again
