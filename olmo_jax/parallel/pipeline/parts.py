"""The three parts of a pipelined model, and access to arrays by indices of their leading dims."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.varying import vary_over

Tree = Any
"""Nested containers of arrays."""

Index = Int32[Array, ""] | int


class Parts(NamedTuple):
    """One thing for each part of the model: function, accumulators, gradients or sums."""

    first: Any
    body: Any
    last: Any


def pick(tree: Tree, *indices: Index) -> Tree:
    """Return each leaf at these indices of its leading dims: a chunk, a chunk's layer."""
    return jax.tree.map(lambda leaf: _pick(leaf, indices), tree)


def _pick(leaf: Array, indices: tuple[Index, ...]) -> Array:
    # One slice of all leading dims: an index a time would copy the whole chunk on the way.
    inner = leaf.shape[len(indices) :]
    sizes = (*[1] * len(indices), *inner)
    starts = (*indices, *[0] * len(inner))
    return lax.dynamic_slice(leaf, starts, sizes, allow_negative_indices=False).reshape(inner)


def put(tree: Tree, values: Tree, index: Index) -> Tree:
    """Return the leaves with `values` at this index of their leading dim."""
    return jax.tree.map(
        lambda leaf, value: lax.dynamic_update_index_in_dim(
            leaf, value, index, 0, allow_negative_indices=False
        ),
        tree,
        values,
    )


def zeros(shapes: Tree, *leading: int) -> Tree:
    """Return zeros of each shape behind the `leading` dims."""
    return jax.tree.map(
        lambda leaf: vary_over(jnp.zeros((*leading, *leaf.shape), leaf.dtype), AXES), shapes
    )


def blank(shapes: Tree, *leading: int) -> Tree:
    """Return buffers to write to. Their first values reach no result."""
    return zeros(shapes, *leading)
