"""What a step does, read off its jaxpr (`jaxpr`) and its compiled program (`hlo`)."""

from olmo_jax.inspect.contract import Contract, Total, measure
from olmo_jax.train.accumulate import MICROBATCHES

__all__ = ["MICROBATCHES", "Contract", "Total", "measure"]
