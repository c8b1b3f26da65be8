"""Body layers on a grid of chunks, ranks and places; what does not divide leaves places empty."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

EMPTY = -1
"""The number that stands in a place without a layer."""


class Grid(NamedTuple):
    """`layer[c, r, i]` is the body layer (from 0) in place i of chunk c of rank r, or `EMPTY`.

    Layers are in order of stages, c P + r, and the empty places at the end of that order. An empty
    place is computed and passes its input on.
    """

    layer: Int32[np.ndarray, "chunks ranks places"]
    num_layers: int

    @property
    def num_places(self) -> int:
        return self.layer.size

    @property
    def waste(self) -> int:
        """Return how many places are empty, in all ranks and chunks together."""
        return self.num_places - self.num_layers


def grid(num_layers: int, ranks: int, chunks: int, *, period: int = 1) -> Grid:
    """Return where each body layer goes.

    `period` is that of the window pattern. A place has the same window on all ranks and chunks, so
    a stage holds whole periods.
    """
    stages = ranks * chunks
    places = -(-num_layers // (stages * period)) * period
    layer = np.arange(stages * places, dtype=np.int32)
    layer[num_layers:] = EMPTY
    return Grid(layer.reshape(chunks, ranks, places), num_layers)


def least_waste(num_layers: int, ranks: int, *, period: int = 1) -> tuple[int, ...]:
    """Return the chunk counts that leave the fewest places empty, in ascending order.

    One chunk is always among them: what divides over more divides over one. More chunks make the
    bubble smaller, and the messages more.
    """
    counts = range(1, max(num_layers // (ranks * period), 1) + 1)
    waste = {chunks: grid(num_layers, ranks, chunks, period=period).waste for chunks in counts}
    return tuple(chunks for chunks in counts if waste[chunks] == min(waste.values()))
