"""Rank lists of both views of the mesh, and the sizes that are inferred."""

import math

import pytest

from olmo_jax.config.records import MeshConfig
from olmo_jax.errors import UserError
from olmo_jax.mesh import axes
from tests.mesh import groups


def sizes_of(**given: int) -> dict[str, int]:
    return dict.fromkeys(axes.AXES, 1) | given


def test_config_has_the_axes_in_rank_order():
    assert tuple(dict(MeshConfig())) == axes.AXES


def test_eight_ranks_with_two_stages_and_expert_pairs():
    sizes = sizes_of(pipeline=2, data=2, expert=2)
    assert groups.expert_model_groups(sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups.expert_data_groups(sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.groups(sizes, ["pipeline"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups.dense_data_groups(sizes) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_eight_ranks_with_expert_pairs_and_no_pipeline():
    sizes = sizes_of(data=4, expert=2)
    assert groups.expert_model_groups(sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups.expert_data_groups(sizes) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_four_ranks_share_rows_and_experts_folded_or_not():
    sizes = sizes_of(expert=1, sequence=2, data=2)
    assert groups.expert_model_groups(sizes, fold_sequence=True) == [[0, 1], [2, 3]]
    sizes = sizes_of(expert=2, sequence=2)
    assert groups.expert_model_groups(sizes, fold_sequence=True) == [[0, 1, 2, 3]]
    assert groups.expert_model_groups(sizes) == [[0, 2], [1, 3]]


# Groups of rank 0, observed on the reference's own mesh builder with 4 and 8 ranks:
# sizes, is the sequence folded, sequence, EP-MP, EP-DP, dense gradient.
RANK_0 = [
    (sizes_of(data=2, expert=2), False, [0], [0, 1], [0, 2], [0, 1, 2, 3]),
    (sizes_of(expert=2, sequence=2), True, [0, 1], [0, 1, 2, 3], [0], [0, 1, 2, 3]),
    (sizes_of(data=2, sequence=2), True, [0, 1], [0, 1], [0, 2], [0, 1, 2, 3]),
    (sizes_of(expert=2, sequence=2), False, [0, 1], [0, 2], [0, 1], [0, 1, 2, 3]),
    (
        sizes_of(data=2, expert=2, sequence=2),
        True,
        [0, 1],
        [0, 1, 2, 3],
        [0, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    (
        sizes_of(pipeline=2, expert=2, sequence=2),
        True,
        [0, 1],
        [0, 1, 2, 3],
        [0],
        [0, 1, 2, 3],
    ),
]


@pytest.mark.parametrize(("sizes", "fold", "sequence", "model", "data", "dense"), RANK_0)
def test_rank_0_has_the_references_neighbours(sizes, fold, sequence, model, data, dense):
    assert groups.groups(sizes, ["sequence"])[0] == sequence
    assert groups.expert_model_groups(sizes, fold_sequence=fold)[0] == model
    assert groups.expert_data_groups(sizes, fold_sequence=fold)[0] == data
    assert groups.dense_gradient_groups(sizes)[0] == dense


@pytest.mark.parametrize("fold", [False, True])
def test_both_expert_views_cross_each_other_once(fold):
    sizes = sizes_of(pipeline=2, data=2, fsdp=3, expert=4, sequence=2)
    for model in groups.expert_model_groups(sizes, fold_sequence=fold):
        for data in groups.expert_data_groups(sizes, fold_sequence=fold):
            assert len(set(model) & set(data)) <= 1
    ranks = [r for group in groups.expert_data_groups(sizes, fold_sequence=fold) for r in group]
    assert sorted(ranks) == list(range(math.prod(sizes.values())))


def test_open_axis_takes_what_the_others_leave():
    assert axes.resolve(MeshConfig(data=-1, expert=4), 32) == sizes_of(data=8, expert=4)
    assert axes.resolve(MeshConfig(data=2, expert=-1), 8) == sizes_of(data=2, expert=4)


def test_given_sizes_may_leave_devices_over():
    assert axes.resolve(MeshConfig(data=2), 8) == sizes_of(data=2)


@pytest.mark.parametrize(
    ("mesh", "num_devices", "fragments"),
    [
        (MeshConfig(data=-1, expert=3), 8, ["mesh.data=-1", "mesh.expert=3", "1, 2, 4 or 8"]),
        (MeshConfig(data=4, expert=4), 8, ["mesh.data=4 x mesh.expert=4 = 16", "are 8", "-1"]),
        (MeshConfig(data=-1, fsdp=-1), 8, ["mesh.data=-1 and mesh.fsdp=-1", "at most 1"]),
    ],
)
def test_sizes_that_do_not_fit_the_devices(mesh, num_devices, fragments):
    with pytest.raises(UserError) as raised:
        axes.resolve(mesh, num_devices)
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value


def test_emulation_makes_eight_devices_for_an_open_axis():
    assert axes.num_devices_wanted(MeshConfig(data=-1, expert=2)) == 8
    assert axes.num_devices_wanted(MeshConfig(data=2, expert=2)) == 4
