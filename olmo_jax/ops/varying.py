"""The mesh axes that a value varies over: constants must agree with the shards they meet."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from olmo_jax.mesh.axes import AXES


def axes_of(value: Array) -> frozenset[str]:
    """Return the mesh axes that `value` varies over; none outside `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def vary_over(value: Array, axes: tuple[str, ...]) -> Array:
    """Mark `value` as varying over `axes`, except those it varies over already."""
    missing = tuple(axis for axis in axes if axis not in axes_of(value))
    return lax.pcast(value, missing, to="varying") if missing else value


def like(value: Array, reference: Array) -> Array:
    """Mark `value` as varying over the axes of `reference`: what a fresh scan carry needs."""
    return vary_over(value, tuple(sorted(axes_of(reference))))


def vary_everywhere(tree: Any) -> Any:
    """Mark every array as this device's own: varying over all mesh axes.

    Of weights, this keeps gradients on the device. Without it autodiff inserts the reduction where
    the weight is used: once a microbatch.
    """
    return jax.tree.map(lambda leaf: vary_over(leaf, AXES), tree)
