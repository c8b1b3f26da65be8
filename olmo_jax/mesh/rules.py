"""Where each parameter lives: the only place where partition specs are written.

A parameter has two roles. `compute` places the weights that forward and backward read, `main` the
FP32 weights and moments. What lies between the two is what an optimizer step communicates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES

Sizes = Mapping[str, int]

COMPUTE: dict[str, dict[str, tuple[str, ...]]] = {"ddp": {"experts": ("expert",)}}
"""Per method: the mesh axes that a logical dim of a compute weight is divided over."""

BATCH = P(None, DENSE_DATA_AXES, "sequence")
"""A step's batch, [microbatches, B, L]."""

ROWS = P(None, DENSE_DATA_AXES)
"""What a step's batch holds once a row, [microbatches, B]."""

DEVICES = P(AXES)
"""One element a device."""

REPLICATED = P()


@dataclass(frozen=True)
class Placed:
    """Both specs of one parameter."""

    compute: P
    main: P


def axes_of_entry(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_used(spec: P) -> tuple[str, ...]:
    """Return the mesh axes that divide some dim, in the spec's order."""
    return tuple(axis for entry in spec for axis in axes_of_entry(entry))


def replica_axes(spec: P) -> tuple[str, ...]:
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
) -> P:
    """Return the spec of a compute weight from its logical dims.

    Raises: UserError if an axis does not divide its dim, or would divide two.
    """
    axes = [rules.get(dim, ()) for dim in dims]
    _check_collision(name, dims, axes)
    for dim, size, entry in zip(dims, shape, axes, strict=True):
        _check_divides(name, dim, size, entry, sizes)
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in axes))


def _first_dim_that_takes(
    axes: tuple[str, ...], shape: Sequence[int], taken: Sequence[tuple[str, ...]], sizes: Sizes
) -> int | None:
    parts = math.prod(sizes[axis] for axis in axes)
    for d, size in enumerate(shape):
        if size % (parts * math.prod(sizes[axis] for axis in taken[d])) == 0:
            return d
    return None


def main_spec(shape: Sequence[int], compute: P, sizes: Sizes) -> P:
    """Return where the FP32 shard lives: `compute`, and every replica axis that divides a dim.

    All replica axes go to the leading dim that takes them together (scattering a later dim would
    transpose the accumulator); else each to the leading dim that takes it. An axis that divides
    no dim stays a replica axis: that part of the state is repeated over it.
    """
    taken = [axes_of_entry(entry) for entry in compute]
    taken += [()] * (len(shape) - len(taken))
    free = tuple(axis for axis in replica_axes(compute) if sizes[axis] > 1)
    together = _first_dim_that_takes(free, shape, taken, sizes)
    groups = [free] if together is not None else [(axis,) for axis in free]
    for axes in groups:
        d = _first_dim_that_takes(axes, shape, taken, sizes)
        if d is not None:
            taken[d] = (*taken[d], *axes)
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in taken))


def place(
    name: str,
    shape: Sequence[int],
    dims: Sequence[str],
    *,
    method: str,
    shard_optimizer: bool,
    sizes: Sizes,
) -> Placed:
    """Return both specs of the leaf `name`."""
    compute = compute_spec(name, shape, dims, COMPUTE[method], sizes)
    return Placed(compute, main_spec(shape, compute, sizes) if shard_optimizer else compute)


def added_axes(placed: Placed) -> list[tuple[int, tuple[str, ...]]]:
    """Return (dim, axes) for each dim that `main` divides further than `compute`."""
    compute = [*placed.compute, *[None] * (len(placed.main) - len(placed.compute))]
    pairs = [
        (axes_of_entry(c), axes_of_entry(m)) for c, m in zip(compute, placed.main, strict=True)
    ]
    return [(d, m[len(c) :]) for d, (c, m) in enumerate(pairs) if m != c]
