"""The specs of a leaf: laws over many shapes and meshes, and what is refused."""

import itertools
import math

import pytest

from olmo_jax.arch.parameters import Parameter
from olmo_jax.errors import UserError
from olmo_jax.mesh import specs
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.specs import Spec

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


def specs_for(shape, dims, sizes, **settings):
    given = {"method": "ddp", "shard_optimizer": True} | settings
    parameter = Parameter(tuple(shape), tuple(dims), "zeros")
    return specs.parameter_specs("leaf", parameter, sizes=sizes, **given)


def dims_of(shape, experts):
    dims = ["d_model"] * len(shape)
    if experts is not None:
        dims[experts] = "experts"
    return dims


def layouts():
    """Yield every (shape, sizes, specs): experts on each dim that they divide, or nowhere."""
    for shape, sizes, method in itertools.product(SHAPES, SIZES, specs.METHODS):
        for experts in [None, *range(len(shape))]:
            if experts is None or shape[experts] % sizes["expert"] == 0:
                dims = dims_of(shape, experts)
                yield shape, sizes, method, specs_for(shape, dims, sizes, method=method)


def parts_of(entry, sizes):
    return math.prod(sizes[axis] for axis in specs.axes_of_entry(entry))


def test_all_specs_divide_every_dim_and_use_no_axis_twice():
    for shape, sizes, _, found in layouts():
        for spec in (found.compute, found.resident, found.main):
            used = specs.axes_used(spec)
            assert len(set(used)) == len(used)
            assert set(used) | set(specs.replica_axes(spec)) == set(AXES)
            assert all(n % parts_of(e, sizes) == 0 for n, e in zip(shape, spec, strict=True))


def test_a_role_keeps_the_axes_of_the_one_before_and_leaves_none_of_its_own_that_a_dim_takes():
    allowed = {"ddp": set(AXES), "fsdp": {"fsdp", "expert", "sequence"}}
    for shape, sizes, method, found in layouts():
        for before, after in (
            (found.compute, found.resident),
            (found.resident, found.main),
        ):
            for pair in zip(before, after, strict=True):
                fewer, more = map(specs.axes_of_entry, pair)
                assert more[: len(fewer)] == fewer
        parts = [parts_of(entry, sizes) for entry in found.main]
        assert set(specs.axes_used(found.main)) <= allowed[method] | {"expert"}
        for axis in allowed[method] & set(specs.replica_axes(found.main)):
            takes = [n % (p * sizes[axis]) == 0 for n, p in zip(shape, parts, strict=True)]
            assert sizes[axis] == 1 or not any(takes)


def test_added_axes_are_the_difference_of_two_specs():
    for shape, sizes, _, found in layouts():
        added = specs.added_axes(found.compute, found.main)
        compute, main = (set(specs.axes_used(spec)) for spec in (found.compute, found.main))
        assert {axis for _, axes in added for axis in axes} == main - compute
        assert all(sizes[axis] > 1 for _, axes in added for axis in axes)
        for dim, axes in added:
            assert set(axes) <= set(specs.axes_of_entry(found.main[len(shape) + dim]))


def test_what_moves_at_every_use_moves_with_fsdp_alone_and_once_a_step_with_ddp_alone():
    for _, _, method, found in layouts():
        at_use = specs.added_axes(found.compute, found.resident)
        once = specs.added_axes(found.resident, found.main)
        assert {"ddp": at_use, "fsdp": once}[method] == ()


def test_fsdp_divides_no_stack_of_layers():
    sizes = dict(zip(AXES, (1, 2, 2, 2, 1), strict=True))
    for shape, dims, wanted in [
        ((4, 8, 5), ("layers", "d_model", "hidden"), Spec(None, ("fsdp", "expert"), None)),
        ((4, 3), ("layers", "d_model"), Spec(None, None)),
        ((4, 8, 6), ("layers", "experts", "hidden"), Spec(None, ("expert", "fsdp"), None)),
        ((4, 2, 6), ("layers", "experts", "hidden"), Spec(None, "expert", "fsdp")),
    ]:
        found = specs_for(shape, dims, sizes, method="fsdp")
        assert found.resident == found.main == wanted
    assert specs_for((4, 3), ("layers", "d_model"), sizes).main == Spec(("data", "fsdp"), None)


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
    assert specs.further_spec(shape, compute, AXES, EIGHT) == main


def test_without_shard_optimizer_nothing_is_added():
    found = specs_for((32, 64), ("d_model", "hidden"), EIGHT, shard_optimizer=False)
    assert found.main == found.resident == found.compute == Spec(None, None)


def test_an_axis_that_does_not_divide_its_dim_is_refused_with_the_sizes_that_do():
    with pytest.raises(UserError) as error:
        specs_for((6, 32), ("experts", "d_model"), {**EIGHT, "expert": 4})
    assert str(error.value) == "mesh.expert=4 does not divide experts=6 of leaf; use 1, 2, 3, 6"


def test_an_axis_that_would_divide_two_dims_is_refused():
    with pytest.raises(UserError) as error:
        specs_for((8, 8), ("experts", "experts"), EIGHT)
    assert str(error.value) == (
        "leaf has dims ('experts', 'experts'): mesh axis expert would divide two of them; an axis "
        "divides at most one dim of a leaf; give one of the dims another axis"
    )
