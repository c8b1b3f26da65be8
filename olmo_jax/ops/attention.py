"""Causal softmax attention inside documents and windows: one call, several backends."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import DTypeLike

from olmo_jax.errors import UserError
from olmo_jax.ops import target
from olmo_jax.ops.blockwise import LOWEST, blockwise, visible


def _dense(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, scale: float
) -> Array:
    """Attend by the whole matrix of logits: the reference that the tests hold the others to."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.einsum("blkgh,bmkh->bkglm", grouped, k, preferred_element_type=jnp.float32)
    positions = jnp.arange(q.shape[1])
    seen = visible(positions, positions, segment_ids, segment_ids, window)[:, None, None]
    logits = jnp.where(seen, logits * scale, -jnp.inf)
    highest = jnp.maximum(lax.stop_gradient(logits.max(axis=-1, keepdims=True)), LOWEST)
    weights = jnp.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0.0, 1.0, total)).astype(v.dtype)
    out = jnp.einsum("bkglm,bmkh->blkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


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
    "blockwise": blockwise,
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
