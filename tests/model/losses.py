"""The router losses over an explicit divisor, as the golden values have them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import RouterConfig
from olmo_jax.model.balance import balance_sum, balance_terms, z_sum


def _divisor(given: float | None, padding_mask: Bool[Array, "B L"]) -> Float32[Array, ""] | float:
    return jnp.maximum(padding_mask.sum(), 1).astype(jnp.float32) if given is None else given


def balance_loss(
    scores: Float[Array, "B L E"],
    experts: Int32[Array, "B L A"],
    padding_mask: Bool[Array, "B L"],
    *,
    config: RouterConfig,
    divisor: float | None = None,
) -> Float32[Array, ""]:
    """Return the balance loss over an explicit divisor, the number of tokens by default.

    Source: olmo_core 3.0.0, nn/moe/loss.py.
    """
    terms = balance_terms(scores, experts, padding_mask, config=config)
    return balance_sum(terms, experts.shape[-1]) / _divisor(divisor, padding_mask)


def z_loss(
    logits: Float[Array, "B L E"], padding_mask: Bool[Array, "B L"], *, divisor: float | None = None
) -> Float32[Array, ""]:
    """Return the router z-loss over an explicit divisor, the number of tokens by default.

    Source: olmo_core 3.0.0, nn/moe/loss.py.
    """
    return z_sum(logits, padding_mask) / _divisor(divisor, padding_mask)
