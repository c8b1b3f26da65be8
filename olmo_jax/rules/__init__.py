"""What must hold between the keys of a config, and what a resumed run may change of it. No jax."""

from olmo_jax.rules.advice import advice
from olmo_jax.rules.effects import without_effect
from olmo_jax.rules.validation import validate, violations, with_mesh

__all__ = ["advice", "validate", "violations", "with_mesh", "without_effect"]
