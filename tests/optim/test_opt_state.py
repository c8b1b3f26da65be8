"""The state of any optimizer, by its parts."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from olmo_jax.optim.opt_state import StateParts, join, map_parts, split

MAIN = {"head.weight": jnp.ones((3, 2)), "head.norm.gain": jnp.ones(3)}
ADAM = optax.scale_by_adam()
OPTIMIZERS = {
    "adam": (ADAM, {"mu", "nu"}, {"count"}),
    "rms": (optax.scale_by_rms(), {"nu"}, set()),
    "momentum": (optax.trace(0.9), {"trace"}, set()),
    "sign": (optax.scale_by_sign(), set(), set()),
    "two": (optax.chain(optax.trace(0.9), ADAM), {"0.trace", "1.mu", "1.nu"}, {"1.count"}),
}
each = pytest.mark.parametrize(
    ("optimizer", "parameters", "others"), OPTIMIZERS.values(), ids=OPTIMIZERS
)


@each
def test_parts_are_named_as_in_the_state_and_joined_are_the_state(optimizer, parameters, others):
    state = optimizer.init(MAIN)
    parts = split(state, MAIN.keys())
    assert (parts.parameters.keys(), parts.others.keys()) == (parameters, others)
    numbered = jax.tree.unflatten(jax.tree.structure(state), range(len(jax.tree.leaves(state))))
    assert join(split(numbered, MAIN.keys()), state, MAIN.keys()) == numbered


@each
def test_what_follows_the_parameters_is_changed_whole_and_the_rest_apart(
    optimizer, parameters, others
):
    state = optimizer.init(MAIN)
    changed = map_parts(state, MAIN.keys(), lambda part: sorted(part), lambda _: "other")
    found = split(changed, MAIN.keys()).others
    assert set(found.values()) <= {*MAIN, "other"}
    assert sum(value == "other" for value in found.values()) == len(others)
    assert sum(value == "head.weight" for value in found.values()) == len(parameters)


def test_the_rest_stays_unless_told():
    state = ADAM.init(MAIN)
    changed = map_parts(state, MAIN.keys(), lambda part: dict.fromkeys(part, 0))
    zeros = dict.fromkeys(MAIN, 0)
    chex.assert_trees_all_equal(changed, state._replace(mu=zeros, nu=zeros))


def test_a_part_with_other_names_follows_nothing():
    parts = split({"a": {"head.weight": 1}}, MAIN.keys())
    assert parts == StateParts({}, {"a.head.weight": 1})
