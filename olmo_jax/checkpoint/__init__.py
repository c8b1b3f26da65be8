"""A run's whole state on disk: written behind its steps, on no mesh, checked when it is read."""

from olmo_jax.checkpoint.manifest import Position, Saved
from olmo_jax.checkpoint.run import Checkpoints, read_saved, restore_weights
from olmo_jax.checkpoint.start import initial_weights, refuse_start

__all__ = [
    "Checkpoints",
    "Position",
    "Saved",
    "initial_weights",
    "read_saved",
    "refuse_start",
    "restore_weights",
]
