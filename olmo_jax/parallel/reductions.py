"""Sums of counts and losses over ranks: the small reductions of a step."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.varying import axes_of, vary_over


def sum_over(value: Array, axes: tuple[str, ...]) -> Array:
    """Return the sum over the ranks along `axes`, as something that each rank has of its own.

    Comm: an all-reduce of `value` over `axes`.
    """
    with jax.named_scope("sum_over"):
        return vary_over(lax.psum(value, axes), tuple(sorted(axes_of(value))))


def sum_everywhere(tree: Any) -> Any:
    """Return each array's sum over the ranks that differ in it, the same on all.

    Comm: an all-reduce of each array, over the axes that it varies over.
    """
    with jax.named_scope("sum_everywhere"):
        return jax.tree.map(_sum, tree)


def _sum(value: Array) -> Array:
    # The type says over which axes ranks differ. A sum over another axis would multiply by its
    # size.
    axes = tuple(axis for axis in AXES if axis in axes_of(value))
    return lax.psum(value, axes) if axes else value


def max_everywhere(value: Array) -> Array:
    """Return the largest value that any rank holds.

    Comm: an all-reduce over all axes.
    """
    with jax.named_scope("max_everywhere"):
        return lax.pmax(value, AXES)
