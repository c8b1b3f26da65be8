"""The specs of a leaf: laws over many shapes and meshes, and what is refused."""

import itertools
import math

import pytest

from olmo_jax.errors import UserError
from olmo_jax.mesh import rules
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.rules import Spec

SIZES = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in [
        (1, 8, 1, 1, 1),
        (1, 2, 2, 2, 1),
        (1, 2, 1, 4, 1),
        (1, 3, 1, 2, 1),
        (2, 2, 1, 2, 2),
        (1, 1, 1, 1, 1),
    ]
]
SHAPES = [(67, 32), (2, 32, 4, 6), (6,), (7,), (1, 5), (48,), (8, 20, 32), (2, 8, 20, 32), (12, 2)]


def place(shape, dims, sizes, **settings):
    given = {"method": "ddp", "shard_optimizer": True} | settings
    return rules.place("leaf", shape, dims, sizes=sizes, **given)


def dims_of(shape, experts):
    dims = ["d_model"] * len(shape)
    if experts is not None:
        dims[experts] = "experts"
    return dims


def layouts():
    """Yield every (shape, sizes, specs): experts on each dim that they divide, or nowhere."""
    for shape, sizes, method in itertools.product(SHAPES, SIZES, rules.METHODS):
        for experts in [None, *range(len(shape))]:
            if experts is None or shape[experts] % sizes["expert"] == 0:
                dims = dims_of(shape, experts)
                yield shape, sizes, method, place(shape, dims, sizes, method=method)


def parts_of(entry, sizes):
    return math.prod(sizes[axis] for axis in rules.axes_of_entry(entry))


def test_all_specs_divide_every_dim_and_use_no_axis_twice():
    for shape, sizes, _, placed in layouts():
        for spec in (placed.compute, placed.resident, placed.main):
            used = rules.axes_used(spec)
            assert len(set(used)) == len(used)
            assert set(used) | set(rules.replica_axes(spec)) == set(AXES)
            assert all(n % parts_of(e, sizes) == 0 for n, e in zip(shape, spec, strict=True))


def test_a_role_keeps_the_axes_of_the_one_before_and_leaves_none_of_its_own_that_a_dim_takes():
    allowed = {"ddp": set(AXES), "fsdp": {"fsdp", "expert", "sequence"}}
    for shape, sizes, method, placed in layouts():
        for before, after in (
            (placed.compute, placed.resident),
            (placed.resident, placed.main),
        ):
            for pair in zip(before, after, strict=True):
                fewer, more = map(rules.axes_of_entry, pair)
                assert more[: len(fewer)] == fewer
        parts = [parts_of(entry, sizes) for entry in placed.main]
        assert set(rules.axes_used(placed.main)) <= allowed[method] | {"expert"}
        for axis in allowed[method] & set(rules.replica_axes(placed.main)):
            takes = [n % (p * sizes[axis]) == 0 for n, p in zip(shape, parts, strict=True)]
            assert sizes[axis] == 1 or not any(takes)


def test_cuts_are_the_difference_of_two_specs():
    for shape, sizes, _, placed in layouts():
        added = rules.cuts(placed.compute, placed.main)
        compute, main = (set(rules.axes_used(spec)) for spec in (placed.compute, placed.main))
        assert {axis for _, axes in added for axis in axes} == main - compute
        assert all(sizes[axis] > 1 for _, axes in added for axis in axes)
        for dim, axes in added:
            assert set(axes) <= set(rules.axes_of_entry(placed.main[len(shape) + dim]))


def test_what_moves_at_every_use_moves_with_fsdp_alone_and_once_a_step_with_ddp_alone():
    for _, _, method, placed in layouts():
        at_use = rules.cuts(placed.compute, placed.resident)
        once = rules.cuts(placed.resident, placed.main)
        assert {"ddp": at_use, "fsdp": once}[method] == ()


def test_fsdp_divides_no_stack_of_layers():
    sizes = dict(zip(AXES, (1, 2, 2, 2, 1), strict=True))
    for shape, dims, wanted in [
        ((4, 8, 5), ("layers", "d_model", "hidden"), Spec(None, ("fsdp", "expert"), None)),
        ((4, 3), ("layers", "d_model"), Spec(None, None)),
        ((4, 8, 6), ("layers", "experts", "hidden"), Spec(None, ("expert", "fsdp"), None)),
        ((4, 2, 6), ("layers", "experts", "hidden"), Spec(None, "expert", "fsdp")),
    ]:
        placed = place(shape, dims, sizes, method="fsdp")
        assert placed.resident == placed.main == wanted
    assert place((4, 3), ("layers", "d_model"), sizes).main == Spec(("data", "fsdp"), None)


EIGHT = SIZES[1]


@pytest.mark.parametrize(
    ("shape", "compute", "main"),
    [
        # All axes on the leading dim that takes them together.
        ((32, 64), Spec(None, None), Spec(("data", "fsdp", "expert"), None)),
        ((67, 32), Spec(None, None), Spec(None, ("data", "fsdp", "expert"))),
        ((2, 32), Spec(None, None), Spec(None, ("data", "fsdp", "expert"))),
        # No dim takes 8: each axis goes where it fits.
        ((2, 6), Spec(None, None), Spec("data", "fsdp")),
        ((4, 6), Spec(None, None), Spec(("data", "fsdp"), "expert")),
        ((7,), Spec(None), Spec(None)),
        # Experts are divided already: their replicas are data and fsdp.
        ((2, 8, 20), Spec(None, "expert", None), Spec(None, ("expert", "data", "fsdp"), None)),
    ],
)
def test_main_prefers_the_leading_dim_that_takes_all_replica_axes(shape, compute, main):
    assert rules.further_spec(shape, compute, AXES, EIGHT) == main


def test_without_shard_optimizer_nothing_is_added():
    placed = place((32, 64), ("d_model", "hidden"), EIGHT, shard_optimizer=False)
    assert placed.main == placed.resident == placed.compute == Spec(None, None)


def test_an_axis_that_does_not_divide_its_dim_is_refused_with_the_sizes_that_do():
    with pytest.raises(UserError) as error:
        place((6, 32), ("experts", "d_model"), {**EIGHT, "expert": 4})
    assert str(error.value) == "mesh.expert=4 does not divide experts=6 of leaf; use 1, 2, 3, 6"


def test_an_axis_that_would_divide_two_dims_is_refused():
    with pytest.raises(UserError) as error:
        place((8, 8), ("experts", "experts"), EIGHT)
    assert str(error.value) == (
        "leaf has dims ('experts', 'experts'): mesh axis expert would divide two of them; an axis "
        "divides at most one dim of a leaf; give one of the dims another axis"
    )
