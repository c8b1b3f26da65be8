"""The model, and its one-device oracle."""

from olmo_jax.model.objective import apply, loss, objective

__all__ = ["apply", "loss", "objective"]
