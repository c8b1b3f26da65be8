"""How rows are laid out over the `sequence` ranks: the one place where they are cut."""

from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from olmo_jax.arch.labels import IGNORED
from olmo_jax.arch.sizes import PIECES, Context, held_pieces, padded_length
from olmo_jax.data.batch import Batch

_PADDING = {
    "tokens": 0,
    "labels": IGNORED,
    "segment_ids": -1,
    "positions": 0,
    "padding_mask": False,
}
"""What a position that no row has: it counts nowhere, sees nothing and is seen by nothing."""


def row_order(length: int, context: Context, num_ranks: int) -> Int[np.ndarray, " L"]:
    """Return the place in a padded row of each position, rank by rank."""
    piece = length // (num_ranks * PIECES[context])
    ranks = (held_pieces(context, rank, num_ranks) for rank in range(num_ranks))
    return np.concatenate([n * piece + np.arange(piece) for pieces in ranks for n in pieces])


def _laid_out(
    value: Shaped[np.ndarray, "B L"], fill: Any, context: Context, num_ranks: int
) -> Shaped[np.ndarray, "B padded"]:
    length = padded_length(value.shape[1], context, num_ranks)
    padded = np.pad(value, ((0, 0), (0, length - value.shape[1])), constant_values=fill)
    return padded[:, row_order(length, context, num_ranks)]


def lay_out(batch: Batch, context: Context, num_ranks: int) -> Batch:
    """Return rows of which each of `num_ranks` equal slices is what one rank holds.

    Labels, which are shifted already, go with their tokens, positions and segment ids with theirs;
    padding fills up the last pieces.
    """
    if num_ranks == 1:
        return batch
    parts = {
        name: _laid_out(np.asarray(getattr(batch, name)), fill, context, num_ranks)
        for name, fill in _PADDING.items()
    }
    return batch._replace(**parts)
