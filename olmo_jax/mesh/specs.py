"""How each parameter is divided: the only module that writes partition specs.

A parameter has three. `compute` is the weight as forward and backward read it, `resident` what a
device stores of it through a step (and its gradient), `main` the FP32 weight and its moments. What
lies between `compute` and `resident` moves at every use of the weight, what lies between `resident`
and `main` once a step. The methods differ in `METHODS` and in nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from olmo_jax.arch.parameters import STAGED, Parameter
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES, expert_model_axes

Sizes = Mapping[str, int]


class Spec(tuple):
    """A partition spec without jax: for each dim the mesh axes that divide it, None for none.

    It is one leaf of a pytree. `train.state.partition` turns it into jax's.
    """

    def __new__(cls, *entries: str | tuple[str, ...] | None) -> "Spec":
        return super().__new__(cls, entries)


@dataclass(frozen=True)
class Method:
    """What a method divides: logical dims for compute, and by which mesh axes it goes further.

    `resident` and `main` are the axes that these roles may add, each to the role before it. With
    `keeps_weights` the resident weights are a copy in the compute dtype; without, they are `main`.
    """

    compute: Mapping[str, tuple[str, ...]]
    resident: tuple[str, ...]
    main: tuple[str, ...]
    keeps_weights: bool


_COMPUTE = {"stages": ("pipeline",), "experts": ("expert",)}

METHODS = {
    "ddp": Method(_COMPUTE, resident=(), main=AXES, keeps_weights=True),
    "fsdp": Method(_COMPUTE, resident=("fsdp", "expert", "sequence"), main=(), keeps_weights=False),
}

BATCH = Spec(None, DENSE_DATA_AXES, "sequence")
"""A step's batch, [microbatches, B, L]."""

ROWS = Spec(None, DENSE_DATA_AXES)
"""What a step's batch holds once a row, [microbatches, B], or of whole rows, [..., L]."""

DEVICES = Spec(AXES)
"""One element a device."""

REPLICATED = Spec()


@dataclass(frozen=True)
class ParameterSpecs:
    """The three specs of one parameter."""

    compute: Spec
    resident: Spec
    main: Spec


def axes_of_entry(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_used(spec: Spec) -> tuple[str, ...]:
    """Return the mesh axes that divide some dim, in the spec's order."""
    return tuple(axis for entry in spec for axis in axes_of_entry(entry))


def num_shards(axes: Sequence[str], sizes: Sizes) -> int:
    """Return the number of ranks along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def replica_axes(spec: Spec) -> tuple[str, ...]:
    """Return the mesh axes over which the leaf is repeated."""
    return tuple(axis for axis in AXES if axis not in axes_used(spec))


def _check_divides(name: str, dim: str, size: int, axes: tuple[str, ...], sizes: Sizes) -> None:
    parts = math.prod(sizes[axis] for axis in axes)
    if size % parts:
        legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        given = "*".join(f"mesh.{axis}" for axis in axes)
        raise UserError(f"{given}={parts} does not divide {dim}={size} of {name}; use {legal}")


def _check_collision(name: str, dims: Sequence[str], axes: Sequence[tuple[str, ...]]) -> None:
    flat = [axis for entry in axes for axis in entry]
    twice = sorted({axis for axis in flat if flat.count(axis) > 1})
    if twice:
        raise UserError(
            f"{name} has dims {tuple(dims)}: mesh axis {twice[0]} would divide two of them; "
            "an axis divides at most one dim of a leaf; give one of the dims another axis"
        )


def compute_spec(
    name: str,
    shape: Sequence[int],
    dims: Sequence[str],
    rules: Mapping[str, tuple[str, ...]],
    sizes: Sizes,
) -> Spec:
    """Return the spec of a compute weight from its logical dims.

    Raises: UserError if an axis does not divide its dim, or would divide two.
    """
    axes = [rules.get(dim, ()) for dim in dims]
    _check_collision(name, dims, axes)
    for dim, size, entry in zip(dims, shape, axes, strict=True):
        _check_divides(name, dim, size, entry, sizes)
    return Spec(*(entry[0] if len(entry) == 1 else entry or None for entry in axes))


def _first_dim_that_takes(
    axes: tuple[str, ...], shape: Sequence[int], taken: Sequence[tuple[str, ...]], sizes: Sizes
) -> int | None:
    parts = math.prod(sizes[axis] for axis in axes)
    for d, size in enumerate(shape):
        if size and size % (parts * math.prod(sizes[axis] for axis in taken[d])) == 0:
            return d
    return None


def further_spec(
    shape: Sequence[int],
    spec: Spec,
    axes: tuple[str, ...],
    sizes: Sizes,
    *,
    untouched: Sequence[int] = (),
) -> Spec:
    """Return `spec`, divided further by those of `axes` that it does not use.

    All of them go to the leading dim that takes them together (scattering a later dim would
    transpose the accumulator); else each to the leading dim that takes it. An axis that divides
    no dim, the `untouched` ones aside, stays a replica axis: that part is repeated over it.
    """
    # fsdp=4 and sequence=2 are free, expert=4 divides dim 0 of [8, 4096]:
    #
    #     together 8    dim 0: 8 % (4 * 8)    no
    #                   dim 1: 4096 % 8       yes    -> [expert, (fsdp, sequence)]
    #
    # fsdp=4 and sequence=3 are free, nothing divides [4, 6]:
    #
    #     together 12   no dim
    #     fsdp          dim 0: 4 % 4          yes
    #     sequence      dim 0: 4 % (4 * 3)    no
    #                   dim 1: 6 % 3          yes    -> [fsdp, sequence]
    taken = [axes_of_entry(entry) for entry in spec]
    taken += [()] * (len(shape) - len(taken))
    free = tuple(axis for axis in replica_axes(spec) if axis in axes and sizes[axis] > 1)
    # A dim of size 0 takes no part.
    dims = [0 if d in untouched else size for d, size in enumerate(shape)]
    together = _first_dim_that_takes(free, dims, taken, sizes)
    groups = [free] if together is not None else [(axis,) for axis in free]
    for group in groups:
        d = _first_dim_that_takes(group, dims, taken, sizes)
        if d is not None:
            taken[d] = (*taken[d], *group)
    return Spec(*(entry[0] if len(entry) == 1 else entry or None for entry in taken))


def parameter_specs(
    name: str,
    parameter: Parameter,
    *,
    method: str,
    shard_optimizer: bool,
    sizes: Sizes,
    fold_sequence: bool = False,
) -> ParameterSpecs:
    """Return the specs of the leaf `name`; `fold_sequence` divides experts over `sequence` too.

    Raises: UserError if an axis does not divide its dim, or would divide two.
    """
    shape, dims, rules = parameter.shape, parameter.dims, METHODS[method]
    divided = {**rules.compute, "experts": expert_model_axes(fold_sequence=fold_sequence)}
    compute = compute_spec(name, shape, dims, divided, sizes)
    stacked = [d for d, dim in enumerate(dims) if dim in STAGED]
    resident = further_spec(shape, compute, rules.resident, sizes, untouched=stacked)
    if not shard_optimizer:
        return ParameterSpecs(compute, resident, resident)
    # A checkpoint has the layers of all stages in one dim, so there nothing else divides them.
    untouched = stacked if "stages" in dims else ()
    main = further_spec(shape, resident, rules.main, sizes, untouched=untouched)
    return ParameterSpecs(compute, resident, main)


def layers_spec(shape: Sequence[int], staged: Spec, sizes: Sizes) -> Spec:
    """Return the spec of a staged leaf as [layers, ...], where `pipeline` divides another dim.

    `shape` is that of the result. Where no dim takes it, the leaf is repeated over `pipeline`.
    """
    rest = Spec(None, *staged[len(STAGED) :])
    return further_spec(shape, rest, ("pipeline",), sizes, untouched=(0,))


AddedAxes = tuple[tuple[int, tuple[str, ...]], ...]
"""(dim, axes) for each dim that is divided further, the dim counted from the last, -1."""


def added_axes(before: Spec, after: Spec) -> AddedAxes:
    """Return where `after` divides further than `before`."""
    # An axis that a role adds comes behind those that divide the dim already, so what is added is a
    # tail of each entry: a gather over the tail makes exactly the shard of `before`.
    padded = [*before, *[None] * (len(after) - len(before))]
    pairs = [(axes_of_entry(b), axes_of_entry(a)) for b, a in zip(padded, after, strict=True)]
    return tuple((d - len(pairs), a[len(b) :]) for d, (b, a) in enumerate(pairs) if a != b)
