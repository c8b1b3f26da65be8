"""What a step does, read off its jaxpr (`jaxpr`) and its compiled program (`hlo`)."""

from olmo_jax.inspect.contract import MICROBATCHES, Contract, Total, measure

__all__ = ["MICROBATCHES", "Contract", "Total", "measure"]
