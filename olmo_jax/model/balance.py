"""What keeps experts evenly used: counts, balance and z losses, the rule of the expert bias."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import RouterConfig


class BalanceTerms(NamedTuple):
    """What the balance loss is made of: r is the rows of the batch, or one that holds them all.

    Under a mesh the caller sums `counts` and `tokens`, never `scores`, over the ranks that share a
    row: `sequence` for instance scope, the data ranks for global scope, none for microbatch scope.
    """

    counts: Int32[Array, "r E"]
    tokens: Int32[Array, "r"]
    scores: Float32[Array, "r E"]


def expert_counts(
    experts: Int32[Array, "B L A"], padding_mask: Bool[Array, "B L"], num_experts: int
) -> Int32[Array, "B E"]:
    """Count, row by row, the tokens that chose each expert, padding left out."""
    # A comparison that is summed at once fuses, and needs no scatter; -1 is nobody's expert.
    chosen = jnp.where(padding_mask[..., None], experts, -1)
    is_chosen = chosen[..., None] == jnp.arange(num_experts)
    return is_chosen.sum(axis=(1, 2), dtype=jnp.int32)


def balance_terms(
    scores: Float[Array, "B L E"],
    experts: Int32[Array, "B L A"],
    padding_mask: Bool[Array, "B L"],
    *,
    config: RouterConfig,
) -> BalanceTerms:
    """Return counts, tokens and summed probabilities of each row of `config.balance_scope`.

    Source: olmo_core 3.0.0, nn/moe/loss.py. Differs: padding is left out.
    """
    # Masked before the division: 0 * NaN of a padded token would reach the gradient.
    probabilities = jnp.where(padding_mask[..., None], scores, 1.0)
    if config.gating == "sigmoid":
        probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    terms = BalanceTerms(
        counts=expert_counts(experts, padding_mask, scores.shape[-1]),
        tokens=padding_mask.sum(-1, dtype=jnp.int32),
        scores=jnp.where(padding_mask[..., None], probabilities, 0.0).sum(1),
    )
    return terms if config.balance_scope == "instance" else _one_row(terms)


def _one_row(terms: BalanceTerms) -> BalanceTerms:
    return BalanceTerms(*(value.sum(0, keepdims=True, dtype=value.dtype) for value in terms))


def balance_sum(terms: BalanceTerms, top_k: int) -> Float32[Array, ""]:
    """Return the balance loss summed over tokens: one a token if every expert is used alike.

    That is (E/K) sum_rows sum_e c[e] * p[e] / n, where a row of padding adds 0. To be
    divided by the tokens of the global batch that are not padding. Its gradient flows through p
    alone.
    Source: olmo_core 3.0.0, nn/moe/loss.py. Differs: the divisor is the caller's.
    """
    # Counts are integers without a gradient: it flows through the probabilities alone.
    share = terms.counts / jnp.maximum(terms.tokens, 1)[:, None].astype(jnp.float32)
    return terms.scores.shape[-1] / top_k * jnp.sum(share * terms.scores)


def z_sum(logits: Float[Array, "B L E"], padding_mask: Bool[Array, "B L"]) -> Float32[Array, ""]:
    """Return logsumexp(logits)^2 summed over the tokens that are not padding."""
    log_normaliser = jax.nn.logsumexp(jnp.where(padding_mask[..., None], logits, 0.0), axis=-1)
    return jnp.sum(jnp.where(padding_mask, log_normaliser, 0.0) ** 2)


def bias_update(
    score_bias: Float32[Array, "*layers E"], counts: Int32[Array, "*layers E"], gamma: float
) -> Float32[Array, "*layers E"]:
    """Move the bias by gamma towards the experts used less than the mean; the exact mean stays.

    `counts` are those of the whole step and all data ranks, before any drop.
    Source: olmo_core 3.0.0, nn/moe/v2/router.py.
    Differs: the bias stays FP32 and the mean is exact.
    """
    # sign(mean - count), but no FP32 mean: above 2^24 it is rounded, and an expert that is used
    # exactly as often as the mean would drift.
    num_experts = counts.shape[-1]
    # Quotient and remainder of the total by E, from those of the counts: the total may pass 2^31.
    remainders = jnp.sum(counts % num_experts, axis=-1, keepdims=True, dtype=jnp.int32)
    quotient = jnp.sum(counts // num_experts, axis=-1, keepdims=True, dtype=jnp.int32)
    quotient = quotient + remainders // num_experts
    # mean = quotient + remainder / E with remainder < E: a count above the quotient is above the
    # mean, one below it is below, and only one equal to it needs the remainder.
    sign_at_quotient = jnp.sign(remainders % num_experts)
    sign = jnp.where(counts == quotient, sign_at_quotient, jnp.sign(quotient - counts))
    return score_bias + gamma * sign.astype(jnp.float32)
