"""Cross entropy and z-loss over the vocabulary, a chunk of tokens at a time."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32, Int32

from olmo_jax.arch.labels import IGNORED
from olmo_jax.arch.sizes import pieces
from olmo_jax.ops import varying


def cross_entropy(
    hidden: Float[Array, "T D"],
    weight: Float32[Array, "D V"],
    labels: Int32[Array, " T"],
    *,
    chunk_tokens: int,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Sum cross entropy and squared log-sum-exp over the tokens whose label is not -100.

    Logits are FP32 from a product in the dtype of `hidden`, held for one chunk only, and
    rematerialized for the gradient. The weight gradient is FP32 from its first addend. An ignored
    token's hidden state may hold anything.
    """
    chunks = pieces(labels.shape[0], chunk_tokens)
    missing = chunks.total - labels.shape[0]
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, chunks.size, hidden.shape[1])
    labels = jnp.pad(labels, (0, missing), constant_values=IGNORED).reshape(-1, chunks.size)
    hidden = jnp.where((labels != IGNORED)[..., None], hidden, 0)
    return _chunked(hidden, weight, labels)


@jax.custom_vjp
def _chunked(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    return _chunked_forward(hidden, weight, labels)[0]


def _chunked_forward(hidden: Array, weight: Array, labels: Array):
    # A scan, since all logits at once are [T, V] in FP32, the largest array of a step. Saved is one
    # number a token, the normaliser; the backward makes each chunk's logits once more.
    weight = weight.astype(hidden.dtype)

    def sums_of(_: None, chunk: tuple[Array, Array]):
        states, targets = chunk
        logits = _logits(states, weight)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
        loss_mask = targets != IGNORED
        entropy = jnp.sum(jnp.where(loss_mask, normaliser - target, 0.0))
        square = jnp.sum(jnp.where(loss_mask, normaliser**2, 0.0))
        return None, (entropy, square, normaliser)

    _, (entropy, square, normalisers) = lax.scan(sums_of, None, (hidden, labels))
    normalisers = checkpoint_name(normalisers, "head_normaliser")
    return (entropy.sum(), square.sum()), (hidden, weight, labels, normalisers)


def _chunked_backward(saved: tuple[Array, ...], gradients: tuple[Array, Array]):
    hidden, weight, labels, normalisers = saved

    def add_chunk(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        states, targets, normaliser = chunk
        logits = _logits(states, weight)
        slope = _logits_gradient(logits, targets, normaliser, gradients).astype(states.dtype)
        product = partial(lax.dot_general, preferred_element_type=jnp.float32)
        total += product(states, slope, (((0,), (0,)), ((), ())))
        return total, product(slope, weight, (((1,), (1,)), ((), ()))).astype(states.dtype)

    total = varying.like(jnp.zeros(weight.shape, jnp.float32), hidden)
    total, hidden_gradient = lax.scan(add_chunk, total, (hidden, labels, normalisers))
    return hidden_gradient, total, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _logits(hidden: Array, weight: Array) -> Array:
    return jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)


def _is_target(logits: Array, labels: Array) -> Array:
    return lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]


def _logits_gradient(
    logits: Array, labels: Array, normaliser: Array, gradients: tuple[Array, Array]
) -> Array:
    """Return the FP32 gradient of both sums in the logits: zero for an ignored token."""
    # With Z = logsumexp(logits) and p = exp(logits - Z), dZ/dlogits is p, so
    #
    #     d(Z - logit[target]) = p - [target],    d(Z^2) = 2 Z p.
    entropy, square = gradients
    scale = entropy + 2.0 * square * normaliser
    probability = jnp.exp(logits - normaliser[:, None])
    slope = scale[:, None] * probability - jnp.where(_is_target(logits, labels), entropy, 0.0)
    return jnp.where((labels != IGNORED)[:, None], slope, 0.0)
