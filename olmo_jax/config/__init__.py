"""The configuration as typed records, the YAML it is written in, and the words of its messages."""

from olmo_jax.config.records import Config

__all__ = ["Config"]
