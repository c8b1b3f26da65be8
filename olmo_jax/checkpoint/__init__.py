"""A run's whole state on disk: written behind its steps, on no mesh, checked when it is read."""

from olmo_jax.checkpoint.checkpoints import Checkpoints, read_saved, restore_weights
from olmo_jax.checkpoint.initial_weights import initial_weights, refuse_start
from olmo_jax.checkpoint.manifest import Position, Saved

__all__ = [
    "Checkpoints",
    "Position",
    "Saved",
    "initial_weights",
    "read_saved",
    "refuse_start",
    "restore_weights",
]
