"""A run's whole state on disk: written behind its steps, on no mesh, checked when it is read."""

from olmo_jax.checkpoint.checkpoints import (
    Checkpoints,
    check_weights,
    read_saved,
    restore_weights,
)
from olmo_jax.checkpoint.folders import RUN_ID, refuse_in_the_way, run_id_of, steps
from olmo_jax.checkpoint.identity import (
    model_of,
    refuse_edited,
    refuse_other_model,
    refuse_other_tokenizer,
    refuse_other_tokenizer_file,
    tokenizer_of,
)
from olmo_jax.checkpoint.initial_weights import initial_weights, refuse_start, source_of_weights
from olmo_jax.checkpoint.manifest import Position, Saved

__all__ = [
    "RUN_ID",
    "Checkpoints",
    "Position",
    "Saved",
    "check_weights",
    "initial_weights",
    "model_of",
    "read_saved",
    "refuse_edited",
    "refuse_in_the_way",
    "refuse_other_model",
    "refuse_other_tokenizer",
    "refuse_other_tokenizer_file",
    "refuse_start",
    "restore_weights",
    "run_id_of",
    "source_of_weights",
    "steps",
    "tokenizer_of",
]
