"""Causal softmax attention inside documents and windows: one call, several backends."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import DTypeLike

from olmo_jax.errors import UserError
from olmo_jax.ops import target, varying
from olmo_jax.plan.static_sizes import block_pairs, block_size

# Below any logit, and finite: the maximum of a row that sees nothing, to which exp(-inf - it) is 0.
_LOWEST = -1e30

Residuals = tuple[Array, Array, Array, Array | None, Array, Array]


def _visible(
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


def _dense(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> Array:
    """Attend by the whole matrix of logits: the reference that the tests hold the others to."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.einsum("blkgh,bmkh->bkglm", grouped, k, preferred_element_type=jnp.float32)
    positions = jnp.arange(q.shape[1])
    seen = _visible(positions, positions, segment_ids, segment_ids, window)[:, None, None]
    logits = jnp.where(seen, logits * scale, -jnp.inf)
    highest = jnp.maximum(lax.stop_gradient(logits.max(axis=-1, keepdims=True)), _LOWEST)
    weights = jnp.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0.0, 1.0, total)).astype(v.dtype)
    out = jnp.einsum("bkglm,bmkh->blkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def _cut(x: Array, size: int, num_kv_heads: int) -> Array:
    """Cut positions into blocks; the query heads of one key head follow one another as rows.

    Shapes: [B, L, K G, H] to [blocks, B, K, G size, H], zeros after the end.
    """
    num_sequences, length, _, width = x.shape
    num_blocks = math.ceil(length / size)
    padded = jnp.pad(x, ((0, 0), (0, num_blocks * size - length), (0, 0), (0, 0)))
    blocks = padded.reshape(num_sequences, num_blocks, size, num_kv_heads, -1, width)
    blocks = blocks.transpose(1, 0, 3, 4, 2, 5)
    return blocks.reshape(num_blocks, num_sequences, num_kv_heads, -1, width)


def _join(blocks: Array, size: int, like: Array) -> Array:
    """Undo `_cut` for a result of the shape and dtype of `like`."""
    num_blocks, num_sequences, num_kv_heads, _, width = blocks.shape
    x = blocks.reshape(num_blocks, num_sequences, num_kv_heads, -1, size, width)
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(num_sequences, num_blocks * size, *like.shape[2:])
    return x[:, : like.shape[1]].astype(like.dtype)


def _cut_segments(segment_ids: Array | None, size: int) -> Array | None:
    if segment_ids is None:
        return None
    num_sequences, length = segment_ids.shape
    num_blocks = math.ceil(length / size)
    padding = ((0, 0), (0, num_blocks * size - length))
    padded = jnp.pad(segment_ids, padding, constant_values=-1)
    return padded.reshape(num_sequences, num_blocks, size).swapaxes(0, 1)


def _at(blocks: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _put(blocks: Array, block: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, block, index, 0)


def _dot(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _logits(
    q: Array, k: Array, pair: Array, segments: Array | None, window: int | None, scale: float
) -> Array:
    """Return the scaled logits of one pair of blocks, -inf where the query does not see the key.

    Positions after the end need no mask of their own: only positions after the end see them.
    """
    size = k.shape[2]
    queries, keys = (block * size + jnp.arange(size) for block in pair)
    ids = [None if segments is None else _at(segments, block) for block in pair]
    seen = _visible(queries, keys, ids[0], ids[1], window)[:, None, None]
    logits = _dot("bkrh,bkch->bkrc", q, k) * scale
    grouped = logits.reshape(*logits.shape[:2], -1, size, size)
    return jnp.where(seen, grouped, -jnp.inf).reshape(logits.shape)


def _blockwise_forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> tuple[Array, Residuals]:
    """Run the online softmax over the list of pairs.

    Source: Dao et al. 2022, FlashAttention, algorithm 1.
    """
    size = block_size(q.shape[1])
    q_blocks, k_blocks, v_blocks = (_cut(x, size, k.shape[2]) for x in (q, k, v))
    segments = _cut_segments(segment_ids, size)

    def add_pair(carry: tuple[Array, Array, Array], pair: Array):
        sums, totals, highest = carry
        i, j = pair
        logits = _logits(_at(q_blocks, i), _at(k_blocks, j), pair, segments, window, scale)
        before = _at(highest, i)
        after = jnp.maximum(before, logits.max(axis=-1))
        weights, shrink = jnp.exp(logits - after[..., None]), jnp.exp(before - after)
        attended = _dot("bkrc,bkch->bkrh", weights.astype(v.dtype), _at(v_blocks, j))
        total = _at(totals, i) * shrink + weights.sum(axis=-1)
        attended = _at(sums, i) * shrink[..., None] + attended
        return (_put(sums, attended, i), _put(totals, total, i), _put(highest, after, i)), None

    sums = varying.like(jnp.zeros(q_blocks.shape, jnp.float32), q)
    totals = varying.like(jnp.zeros(q_blocks.shape[:-1], jnp.float32), q)
    carry = (sums, totals, totals + _LOWEST)
    pairs = jnp.asarray(block_pairs(q.shape[1], window))
    (sums, totals, highest), _ = lax.scan(add_pair, carry, pairs)
    totals = jnp.where(totals == 0.0, 1.0, totals)
    out = checkpoint_name(_join(sums / totals[..., None], size, q), "attention")
    logsumexp = checkpoint_name(highest + jnp.log(totals), "attention_logsumexp")
    return out, (q, k, v, segment_ids, out, logsumexp)


def _blockwise_backward(
    window: int | None, scale: float, residuals: Residuals, d_out: Array
) -> tuple[Array, Array, Array, None]:
    """Recompute the weights of each pair from the logsumexp.

    Source: Dao et al. 2022, FlashAttention, algorithm 4.
    """
    q, k, v, segment_ids, out, logsumexp = residuals
    size = block_size(q.shape[1])
    q_blocks, k_blocks, v_blocks = (_cut(x, size, k.shape[2]) for x in (q, k, v))
    d_out_blocks = _cut(d_out, size, k.shape[2])
    delta = (_cut(out, size, k.shape[2]).astype(jnp.float32) * d_out_blocks).sum(axis=-1)
    segments = _cut_segments(segment_ids, size)

    def add_pair(carry: tuple[Array, Array, Array], pair: Array):
        dq, dk, dv = carry
        i, j = pair
        q_block, k_block, d_out_block = _at(q_blocks, i), _at(k_blocks, j), _at(d_out_blocks, i)
        logits = _logits(q_block, k_block, pair, segments, window, scale)
        weights = jnp.exp(logits - _at(logsumexp, i)[..., None])
        d_weights = _dot("bkrh,bkch->bkrc", d_out_block, _at(v_blocks, j))
        d_logits = (weights * (d_weights - _at(delta, i)[..., None]) * scale).astype(q.dtype)
        dv_block = _dot("bkrc,bkrh->bkch", weights.astype(d_out.dtype), d_out_block)
        dk_block = _dot("bkrc,bkrh->bkch", d_logits, q_block)
        dq_block = _dot("bkrc,bkch->bkrh", d_logits, k_block)
        return (
            _put(dq, _at(dq, i) + dq_block, i),
            _put(dk, _at(dk, j) + dk_block, j),
            _put(dv, _at(dv, j) + dv_block, j),
        ), None

    for_queries = varying.like(jnp.zeros(q_blocks.shape, jnp.float32), q)
    for_keys = varying.like(jnp.zeros(k_blocks.shape, jnp.float32), q)
    pairs = jnp.asarray(block_pairs(q.shape[1], window))
    (dq, dk, dv), _ = lax.scan(add_pair, (for_queries, for_keys, for_keys), pairs)
    return _join(dq, size, q), _join(dk, size, k), _join(dv, size, v), None


def _blockwise_value(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> Array:
    return _blockwise_forward(q, k, v, segment_ids, window, scale)[0]


_blockwise = jax.custom_vjp(_blockwise_value, nondiff_argnums=(4, 5))
_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def cudnn_refusal(dtype: DTypeLike, head_dim: int, length: int, *, segmented: bool) -> str | None:
    """Return why cuDNN cannot attend to such arrays, or None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16 or float16"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim={head_dim} is not a multiple of 8 up to 128"
    if segmented and length % 2:
        return f"with segment ids the length must be even, and {length} is odd"
    return None


def _cudnn(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> Array:
    """Attend by cuDNN's kernel; segment ids reach it as a mask of [B, 1, L, L]."""
    segmented = segment_ids is not None
    refusal = cudnn_refusal(q.dtype, q.shape[3], q.shape[1], segmented=segmented)
    if refusal is not None:
        raise UserError(f"attention backend=cudnn: {refusal}; use backend=blockwise")
    mask = (
        None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None]
    )
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    if segment_ids is None:
        return out
    # cuDNN has no row that sees nothing: padding sees padding, and its result is dropped here.
    return jnp.where((segment_ids >= 0)[..., None, None], out, 0)


_BACKENDS: dict[str, Callable[[Array, Array, Array, Array | None, int | None, float], Array]] = {
    "blockwise": _blockwise,
    "dense": _dense,
    "cudnn": _cudnn,
}


def default_backend(dtype: DTypeLike, head_dim: int, length: int, *, segmented: bool) -> str:
    """Return `cudnn` on a GPU if it takes such arrays, else `blockwise`."""
    refusal = cudnn_refusal(dtype, head_dim, length, segmented=segmented)
    return "cudnn" if target.here().is_gpu and refusal is None else "blockwise"


def attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    *,
    segment_ids: Int[Array, "B L"] | None,
    window: int | None,
    scale: float,
    backend: str | None = None,
) -> Float[Array, "B L N H"]:
    """Let each position attend to itself and to what its document and window hold before it.

    Query head n reads key head n // (N / K). A negative segment id marks padding, which sees
    nothing and is seen by nothing: its result is 0, and so are its gradients. Softmax and sums
    are FP32. A recompute policy can save `attention` and `attention_logsumexp` (blockwise).

    Raises: UserError if there is no such backend, or it cannot honour what it is given.
    """
    segmented = segment_ids is not None
    name = backend or default_backend(q.dtype, q.shape[3], q.shape[1], segmented=segmented)
    if name not in _BACKENDS:
        raise UserError(
            f"attention backend={name} does not exist; use one of {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[name](q, k, v, segment_ids, window, scale)
