"""Attention block by block: an online softmax over a list of pairs (query block, key block).

The list is made at trace time; where a block's positions begin may be known at run time only. So
the same functions serve a whole sequence and the keys of another rank.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int

from olmo_jax.arch.sizes import block_pairs, block_size
from olmo_jax.ops import varying

LOWEST = -1e30
"""Below any logit, and finite: what a row that sees nothing has as its maximum."""


class Queries(NamedTuple):
    """Blocks of queries; the query heads of one key head follow one another as rows.

    Shapes: `blocks` [blocks, B, K, G size, H], `begins` [blocks] the first position of each,
    `segments` [blocks, B, size] or None.
    """

    blocks: Array
    begins: Array
    segments: Array | None


class Keys(NamedTuple):
    """Blocks of keys and values, [blocks, B, K, size, H]; the rest as in `Queries`."""

    k: Array
    v: Array
    begins: Array
    segments: Array | None


class SoftmaxState(NamedTuple):
    """State of the online softmax, FP32: [blocks, B, K, G size, H], twice without H."""

    attended: Array
    totals: Array
    highest: Array


class Softmaxed(NamedTuple):
    """What backward needs of the result: cotangent, normaliser, and sum of result x cotangent."""

    d_out: Array
    logsumexp: Array
    delta: Array


class Gradients(NamedTuple):
    """FP32, shaped as the blocks of q, k and v."""

    q: Array
    k: Array
    v: Array


def visible(
    queries: Int[Array, " l"],
    keys: Int[Array, " m"],
    query_segments: Int[Array, "B l"] | None,
    key_segments: Int[Array, "B m"] | None,
    window: int | None,
) -> Bool[Array, "... l m"]:
    """Say which key each query sees: none after it, outside the window, or of another document."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    if query_segments is None or key_segments is None:
        return seen[None]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return seen & same & (query_segments >= 0)[:, :, None]


def _padded_blocks(x: Array, pieces: int, fill: int = 0) -> Array:
    """Split the positions of each piece into blocks: [B, L, ...] to [B, blocks, size, ...]."""
    # Each piece is padded by itself, so that no block holds positions of two pieces.
    size = block_size(x.shape[1] // pieces)
    parts = x.reshape(x.shape[0], pieces, -1, *x.shape[2:])
    after = [(0, 0), (0, 0), (0, -parts.shape[2] % size)] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(parts, after, constant_values=fill)
    return padded.reshape(x.shape[0], -1, size, *x.shape[2:])


def to_blocks(x: Array, num_kv_heads: int, *, pieces: int = 1) -> Array:
    """Split [B, L, K G, H], of `pieces` equal pieces, into [blocks, B, K, G size, H].

    Zeros pad each piece to a whole number of blocks.
    """
    blocks = _padded_blocks(x, pieces)
    num_sequences, num_blocks, size, _, width = blocks.shape
    blocks = blocks.reshape(num_sequences, num_blocks, size, num_kv_heads, -1, width)
    blocks = blocks.transpose(1, 0, 3, 4, 2, 5)
    return blocks.reshape(num_blocks, num_sequences, num_kv_heads, -1, width)


def from_blocks(
    blocks: Array, shape: tuple[int, ...], dtype: DTypeLike, *, pieces: int = 1
) -> Array:
    """Undo `to_blocks` for a result of this shape and dtype."""
    num_blocks, num_sequences, num_kv_heads, _, width = blocks.shape
    piece = shape[1] // pieces
    x = blocks.reshape(num_blocks, num_sequences, num_kv_heads, -1, block_size(piece), width)
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(num_sequences, pieces, -1, *shape[2:])
    return x[:, :, :piece].reshape(shape).astype(dtype)


def segment_blocks(segment_ids: Array | None, *, pieces: int = 1) -> Array | None:
    """Split [B, L] into [blocks, B, size], -1 after the end of a piece."""
    if segment_ids is None:
        return None
    return _padded_blocks(segment_ids, pieces, fill=-1).swapaxes(0, 1)


def block_begins(starts: Int[Array, " pieces"], piece: int) -> Int[Array, " blocks"]:
    """Return the first position of each block, from those of the pieces."""
    size = block_size(piece)
    offsets = jnp.arange(math.ceil(piece / size), dtype=jnp.int32) * size
    return (starts[:, None] + offsets).reshape(-1)


def _at(blocks: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _put(blocks: Array, block: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, block, index, 0)


def _dot(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _logits(
    queries: Queries, keys: Keys, pair: Array, window: int | None, scale: float
) -> Float32[Array, "B K r size"]:
    """Return the scaled logits of one pair of blocks, -inf where the query does not see the key.

    Positions after the end need no mask of their own: only positions after the end see them. Where
    another piece follows, segments must say where each one ends.
    """
    i, j = pair
    size = keys.k.shape[3]
    offsets = jnp.arange(size)
    seen = visible(
        _at(queries.begins, i) + offsets,
        _at(keys.begins, j) + offsets,
        None if queries.segments is None else _at(queries.segments, i),
        None if keys.segments is None else _at(keys.segments, j),
        window,
    )[:, None, None]
    logits = _dot("bkrh,bkch->bkrc", _at(queries.blocks, i), _at(keys.k, j)) * scale
    grouped = logits.reshape(*logits.shape[:2], -1, size, size)
    return jnp.where(seen, grouped, -jnp.inf).reshape(logits.shape)


def empty_state(queries: Queries) -> SoftmaxState:
    """Return the state of queries that have seen nothing yet."""
    blocks = queries.blocks
    attended = varying.like(jnp.zeros(blocks.shape, jnp.float32), blocks)
    totals = varying.like(jnp.zeros(blocks.shape[:-1], jnp.float32), blocks)
    return SoftmaxState(attended, totals, totals + LOWEST)


def add_pairs(
    state: SoftmaxState,
    pairs: Int[Array, "pairs 2"],
    queries: Queries,
    keys: Keys,
    *,
    window: int | None,
    scale: float,
) -> SoftmaxState:
    """Add what the queries see of the keys in these pairs of blocks.

    Source: Dao et al. 2022, FlashAttention, algorithm 1.
    """

    def add(state: SoftmaxState, pair: Array) -> tuple[SoftmaxState, None]:
        # With m the highest logit of a query so far, the state is
        #
        #     totals = sum exp(logit - m),    attended = sum exp(logit - m) v.
        #
        # A new maximum m' shrinks both by exp(m - m'), since exp(logit - m) exp(m - m') is
        # exp(logit - m'). m starts at LOWEST and not at -inf: for a query that sees nothing
        # exp(-inf - LOWEST) is 0, and exp(-inf - (-inf)) would be NaN.
        i, j = pair
        logits = _logits(queries, keys, pair, window, scale)
        before = _at(state.highest, i)
        after = jnp.maximum(before, logits.max(axis=-1))
        weights, shrink = jnp.exp(logits - after[..., None]), jnp.exp(before - after)
        attended = _dot("bkrc,bkch->bkrh", weights.astype(keys.v.dtype), _at(keys.v, j))
        total = _at(state.totals, i) * shrink + weights.sum(axis=-1)
        attended = _at(state.attended, i) * shrink[..., None] + attended
        return SoftmaxState(
            _put(state.attended, attended, i),
            _put(state.totals, total, i),
            _put(state.highest, after, i),
        ), None

    return lax.scan(add, state, pairs)[0]


def finish(state: SoftmaxState) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """Return, in blocks, what was attended to and the logsumexp; 0 where nothing was seen."""
    totals = jnp.where(state.totals == 0.0, 1.0, state.totals)
    return state.attended / totals[..., None], state.highest + jnp.log(totals)


def softmaxed(out: Array, d_out: Array, logsumexp: Array) -> Softmaxed:
    """Return what backward needs; `out` and `d_out` in blocks."""
    # Through a softmax with weights w, d_logit_j = w_j (d_w_j - sum_k w_k d_w_k), and d_w_k is
    # d_out . v_k. The sum over keys is d_out . out: known before any pair of blocks is visited.
    return Softmaxed(d_out, logsumexp, (out.astype(jnp.float32) * d_out).sum(axis=-1))


def no_gradients(queries: Queries, keys: Keys) -> Gradients:
    """Return zeros."""

    def zeros(blocks: Array) -> Array:
        return varying.like(jnp.zeros(blocks.shape, jnp.float32), queries.blocks)

    return Gradients(zeros(queries.blocks), zeros(keys.k), zeros(keys.v))


def add_gradients(
    gradients: Gradients,
    pairs: Int[Array, "pairs 2"],
    queries: Queries,
    result: Softmaxed,
    keys: Keys,
    *,
    window: int | None,
    scale: float,
) -> Gradients:
    """Add these pairs' part; their weights are rematerialized from the logsumexp.

    Source: Dao et al. 2022, FlashAttention, algorithm 4.
    """
    dtype = queries.blocks.dtype

    def add(gradients: Gradients, pair: Array) -> tuple[Gradients, None]:
        dq, dk, dv = gradients
        i, j = pair
        q, k, d_out = _at(queries.blocks, i), _at(keys.k, j), _at(result.d_out, i)
        logits = _logits(queries, keys, pair, window, scale)
        weights = jnp.exp(logits - _at(result.logsumexp, i)[..., None])
        d_weights = _dot("bkrh,bkch->bkrc", d_out, _at(keys.v, j))
        d_logits = weights * (d_weights - _at(result.delta, i)[..., None]) * scale
        d_logits = d_logits.astype(dtype)
        dv_block = _dot("bkrc,bkrh->bkch", weights.astype(d_out.dtype), d_out)
        dk_block = _dot("bkrc,bkrh->bkch", d_logits, q)
        dq_block = _dot("bkrc,bkch->bkrh", d_logits, k)
        return Gradients(
            _put(dq, _at(dq, i) + dq_block, i),
            _put(dk, _at(dk, j) + dk_block, j),
            _put(dv, _at(dv, j) + dv_block, j),
        ), None

    return lax.scan(add, gradients, pairs)[0]


Residuals = tuple[Array, Array, Array, Array | None, Array, Array]


def _sides(q: Array, k: Array, v: Array, segment_ids: Array | None) -> tuple[Queries, Keys]:
    num_kv_heads = k.shape[2]
    begins = block_begins(jnp.zeros(1, jnp.int32), q.shape[1])
    segments = segment_blocks(segment_ids)
    queries = Queries(to_blocks(q, num_kv_heads), begins, segments)
    return queries, Keys(to_blocks(k, num_kv_heads), to_blocks(v, num_kv_heads), begins, segments)


def _forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> tuple[Array, Residuals]:
    queries, keys = _sides(q, k, v, segment_ids)
    pairs = jnp.asarray(block_pairs(q.shape[1], window))
    state = add_pairs(empty_state(queries), pairs, queries, keys, window=window, scale=scale)
    attended, logsumexp = finish(state)
    out = checkpoint_name(from_blocks(attended, q.shape, q.dtype), "attention")
    logsumexp = checkpoint_name(logsumexp, "attention_logsumexp")
    return out, (q, k, v, segment_ids, out, logsumexp)


def _backward(
    window: int | None, scale: float, residuals: Residuals, d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segment_ids, out, logsumexp = residuals
    queries, keys = _sides(q, k, v, segment_ids)
    result = softmaxed(to_blocks(out, k.shape[2]), to_blocks(d_out, k.shape[2]), logsumexp)
    pairs = jnp.asarray(block_pairs(q.shape[1], window))
    start = no_gradients(queries, keys)
    found = add_gradients(start, pairs, queries, result, keys, window=window, scale=scale)
    dq, dk, dv = (
        from_blocks(blocks, x.shape, x.dtype) for blocks, x in zip(found, (q, k, v), strict=True)
    )
    return dq, dk, dv, None


def _value(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> Array:
    return _forward(q, k, v, segment_ids, window, scale)[0]


blockwise = jax.custom_vjp(_value, nondiff_argnums=(4, 5))
"""Attend to a whole sequence: (q, k, v, segment_ids, window, scale) as `ops.attention` has them."""
blockwise.defvjp(_forward, _backward)
