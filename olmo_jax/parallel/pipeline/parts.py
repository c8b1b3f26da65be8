"""The three parts of a pipelined model, and places in arrays whose leading dims count something."""

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
    """Something of each part of the model: its function, its accumulators, its gradients, its sums."""

    first: Any
    body: Any
    last: Any


def pick(tree: Tree, *places: Index) -> Tree:
    """Return what each leaf has at these places of its leading dims: a chunk, a chunk's layer."""
    return jax.tree.map(lambda leaf: _pick(leaf, places), tree)


def _pick(leaf: Array, places: tuple[Index, ...]) -> Array:
    inner = leaf.shape[len(places) :]
    sizes = (*[1] * len(places), *inner)
    starts = (*places, *[0] * len(inner))
    return lax.dynamic_slice(leaf, starts, sizes, allow_negative_indices=False).reshape(inner)


def put(tree: Tree, values: Tree, place: Index) -> Tree:
    """Return the leaves with `values` at this place of their leading dim."""
    return jax.tree.map(
        lambda leaf, value: lax.dynamic_update_index_in_dim(
            leaf, value, place, 0, allow_negative_indices=False
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
    """Return places to write to. What they hold at first reaches no result."""
    return zeros(shapes, *leading)
