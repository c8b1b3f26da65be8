"""Clipping by the global norm; the norm itself is summed over devices by `parallel`."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def clip_coefficient(norm: Float[Array, ""], max_norm: float | None) -> Float[Array, ""]:
    """Return the factor that brings this global norm down to `max_norm`; 1 if None.

    Source: olmo_core 3.0.0, optim/moe_optimizer.py (as torch.nn.utils.clip_grad_norm_ has it).
    """
    if max_norm is None:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, max_norm / (norm + 1e-6))
