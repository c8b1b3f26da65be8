"""The configuration: typed records, YAML with overrides, and every check that needs no device."""

from olmo_jax.config.effects import without_effect
from olmo_jax.config.load import load, to_yaml
from olmo_jax.config.records import Config
from olmo_jax.config.rules import validate, with_mesh

__all__ = ["Config", "load", "to_yaml", "validate", "with_mesh", "without_effect"]
