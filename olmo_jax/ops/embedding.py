"""Token embedding whose weight gradient is a sorted FP32 segment sum."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Int32

from olmo_jax.arch.sizes import EMBEDDING_TILE, pieces
from olmo_jax.ops import varying


def embed(
    weight: Float32[Array, "V D"], tokens: Int32[Array, "B L"], dtype: DTypeLike
) -> Float[Array, "B L D"]:
    """Take each token's row of `weight`, cast to `dtype`; the weight gradient is FP32.

    The cotangents are widened before anything is added: a bf16 sum stands still after 256 equal
    addends. Rows of equal tokens are added in a fixed order, so the gradient is deterministic.
    """
    return _embed(weight, tokens, jnp.dtype(dtype), weight.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed(weight: Array, tokens: Array, dtype: jnp.dtype, num_rows: int) -> Array:
    # Cast first: a bf16 weight that was only typed float32 is then read as it is stored.
    return jnp.take(weight.astype(dtype), tokens, axis=0, mode="clip")


def _embed_forward(
    weight: Array, tokens: Array, dtype: jnp.dtype, num_rows: int
) -> tuple[Array, Array]:
    return _embed(weight, tokens, dtype, num_rows), tokens


def _embed_backward(
    dtype: jnp.dtype, num_rows: int, tokens: Array, gradient: Array
) -> tuple[Array, None]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    return sum_rows_by_id(flat, tokens.reshape(-1), num_rows), None


_embed.defvjp(_embed_forward, _embed_backward)


def sum_rows_by_id(
    rows: Float[Array, "T D"], ids: Int[Array, " T"], num_ids: int
) -> Float32[Array, "{num_ids} D"]:
    """Sum in FP32 the rows that have the same id, without adding twice to one row at once.

    Rows are sorted by id and taken in tiles; a tile adds one sum per id that it holds. An id
    outside `0 <= id < num_ids` adds nothing.
    """
    # Tiles of 4:
    #
    #     ids      7 2 7 2 2 7
    #     order    1 3 4 0 | 2 5
    #     sorted   2 2 2 7 | 7 7
    #
    # A tile adds one sum to total[2] and one to total[7]; the next one adds to total[7] again. The
    # scan runs tiles in order, so an id's rows are always added in the same order. A scatter-add of
    # all rows would name ids twice, and on a GPU its order differs from run to run.
    split = pieces(ids.shape[0], EMBEDDING_TILE)
    order = jnp.argsort(ids, stable=True)
    missing = split.total - ids.shape[0]
    sorted_ids = jnp.pad(ids[order], (0, missing), constant_values=num_ids)
    order = jnp.pad(order, (0, missing))

    def add_tile(total: Array, tile_of: tuple[Array, Array]) -> tuple[Array, None]:
        tile_ids, indices = tile_of
        values = rows[indices].astype(jnp.float32)
        return _add_sums(total, tile_ids, values, num_ids), None

    total = varying.like(jnp.zeros((num_ids, rows.shape[1]), jnp.float32), rows)
    tiles = (sorted_ids.reshape(-1, split.size), order.reshape(-1, split.size))
    return lax.scan(add_tile, total, tiles)[0]


def _add_sums(total: Array, ids: Array, values: Array, num_ids: int) -> Array:
    # Row i of the product is the sum of all rows whose id is ids[i]: the first row of each run of
    # equal ids writes it, the others go beyond the end.
    #
    #     ids   same       first
    #      2    1 1 1 0      1
    #      2    1 1 1 0      0
    #      2    1 1 1 0      0
    #      7    0 0 0 1      1
    same = ids[:, None] == ids[None, :]
    sums = jnp.matmul(same.astype(jnp.float32), values, precision=lax.Precision.HIGHEST)
    first = jnp.concatenate([jnp.ones_like(ids[:1], bool), ids[1:] != ids[:-1]])
    inside = (ids >= 0) & (ids < num_ids)
    # The rows that do not write get ids of their own beyond the end: no index occurs twice.
    beyond = num_ids + lax.iota(ids.dtype, ids.shape[0])
    indices = jnp.where(first & inside, ids, beyond)
    return total.at[indices].add(sums, mode="drop", unique_indices=True)
