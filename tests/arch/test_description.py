"""The description of the model decides: specs, plan, checkpoint and modules follow it."""

import math

import pytest

from olmo_jax.arch import parameters as described
from olmo_jax.mesh.specs import Spec
from olmo_jax.plan.communication import communication, total_bytes
from olmo_jax.plan.state_memory import state_memory
from olmo_jax.train.program import build
from tests import cases

QUERY = "body.attention.q"
CONFIG = cases.tiny({"data": 2, "expert": 2}, model={"d_model": 40})


@pytest.fixture
def change(monkeypatch):
    """Return a function that changes the description of every block, for the test alone."""

    def apply(edit):
        plain = described.block

        def changed(model, *, routed):
            return edit(plain(model, routed=routed))

        monkeypatch.setattr(described, "block", changed)
        described._leaves.cache_clear()

    yield apply
    monkeypatch.undo()
    described._leaves.cache_clear()


def divide_query_heads(block):
    """Let the axis of the experts divide the heads of the query."""
    dims = ("d_model", "experts", "head_dim")
    return block | {"attention.q": block["attention.q"]._replace(dims=dims)}


def test_specs_plan_and_checkpoint_follow_the_dims_of_a_parameter(change, mesh_of):
    before = cases.layout_of(CONFIG)
    query = before.parameters[QUERY]
    assert before.specs[QUERY].compute == Spec(None, None, None, None)
    held, sent = state_memory(before), total_bytes(communication(before))

    change(divide_query_heads)
    after = cases.layout_of(CONFIG)
    assert after.specs[QUERY].compute == Spec(None, None, "expert", None)
    # The plan: two ranks hold a half each, of the layers and of the leading block's leaf.
    halves = query.size // 2 + math.prod(query.shape[1:]) // 2
    item = 4
    assert held.weights - state_memory(after).weights == item * halves
    assert total_bytes(communication(after)) < sent
    # The checkpoint: what is stored lies as the specs say.
    stored = build(CONFIG, mesh_of(data=2, expert=2)).abstract_stored().main[QUERY]
    assert stored.shape == query.shape
    assert stored.sharding.spec[2] == "expert"


def test_a_parameter_that_a_module_has_and_the_description_lacks_is_named(change, mesh_of):
    change(lambda block: {name: leaf for name, leaf in block.items() if name != "attention.k"})
    model = CONFIG.model.model_copy(update={"d_model": 48})
    with pytest.raises(ValueError, match=r"attention\.k.*which the description of the model has"):
        build(CONFIG.model_copy(update={"model": model}), mesh_of(data=2, expert=2))


def test_a_parameter_that_the_description_has_and_no_module_makes_is_named(change, mesh_of):
    change(lambda block: block | {"attention.latent": block["attention.k"]})
    model = CONFIG.model.model_copy(update={"d_model": 56})
    with pytest.raises(ValueError, match=r"body\.attention\.latent is no leaf in the modules"):
        build(CONFIG.model_copy(update={"model": model}), mesh_of(data=2, expert=2))
