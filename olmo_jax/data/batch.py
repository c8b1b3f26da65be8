"""The record that data, model and step share."""

from typing import Any, NamedTuple

Values = Any
"""An array of JAX or NumPy, or what describes one: a shape, a sharding, a spec."""


class Batch(NamedTuple):
    """Rows of tokens, cut and labelled; `labels` are already shifted.

    Shapes: `sequence` is [B], the others [B, L]; a step's batch has a leading dim of microbatches.
    `padding_mask` is true where there is a token; such a position is in the loss if its label is
    not -100. `positions` restart at each document; `sequence` numbers the rows of the global batch.
    """

    tokens: Values
    labels: Values
    segment_ids: Values
    positions: Values
    padding_mask: Values
    sequence: Values
