"""The first state: the same on every mesh, two buffers a weight, laid out by the two specs."""

import chex
import jax
import numpy as np
import pytest

from tests import cases

MESHES = [{"data": 2, "expert": 4}, {"expert": 2}]
MORE = [{}, {"data": 8}, {"fsdp": 4, "expert": 2}, {"data": 2, "fsdp": 2, "expert": 2}]


@pytest.fixture(scope="module")
def first(program_of):
    return program_of(cases.tiny(MESHES[0])).init()


@pytest.mark.parametrize(
    "mesh", [MESHES[1], *(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in MORE)], ids=str
)
def test_first_weights_do_not_depend_on_the_mesh(mesh, first, program_of):
    other = program_of(cases.tiny(mesh)).init()
    chex.assert_trees_all_equal(cases.host(first), cases.host(other))


def test_weights_start_as_drawn_and_the_rest_at_zero(first):
    assert np.std(first.main["embedding.weight"]) == pytest.approx(0.02, rel=0.1)
    assert (np.asarray(first.main["head.norm.gain"]) == 1).all()
    for leaf in jax.tree.leaves((first.opt_state, first.expert_bias, first.history, first.step)):
        assert not np.asarray(leaf).any()
    chex.assert_trees_all_equal(first.weights, first.main)


def test_main_and_compute_weights_are_two_buffers(first):
    """Both are donated: one buffer for the two would be given away twice."""

    def addresses(tree):
        return {
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        }

    assert not addresses(first.weights) & addresses(first.main)


def test_a_rank_holds_its_share_of_the_optimizer_and_of_the_experts(first):
    def held(leaf):
        return leaf.addressable_shards[0].data.size / leaf.size

    experts = "body.moe.experts.up_gate"
    assert held(first.weights["embedding.weight"]) == 1
    assert held(first.weights[experts]) == 1 / 4
    for tree in (first.main, first.opt_state.mu, first.opt_state.nu):
        assert held(tree["embedding.weight"]) == held(tree[experts]) == 1 / 8
        # 6 numbers divide over data, not over 4 expert ranks.
        assert held(tree["leading.0.attention.q_norm.gain"]) == 1 / 2


def test_without_shard_optimizer_main_weights_lie_as_the_compute_weights_do(program_of):
    layout = program_of(cases.tiny(MESHES[0], shard_optimizer=False)).layout
    assert all(specs.main == specs.compute for specs in layout.specs.values())


def test_router_bias_is_no_parameter(program_of):
    layout = program_of(cases.tiny(MESHES[0])).layout
    assert list(layout.expert_biases) == [cases.EXPERT_BIAS]
    assert cases.EXPERT_BIAS not in layout.specs
