"""Sizes that are fixed when a step is traced: blocks, tiles, chunks, rows received. No jax.

The operations cut their work by these functions, and the plan counts it by the same ones.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from olmo_jax.config.records import TrainConfig
from olmo_jax.mesh.axes import DENSE_DATA_AXES

# The fastest of 128, 256 and 512 by tools/bench_attention.py, at 2,048 positions on a CPU.
BLOCK = 256

EMBEDDING_TILE = 128

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "bool": 1}

# Fewest and most rows. Below 64 the loop costs more than the rows that a smaller tile saves.
CPU_TILE = (64, 512)


class Pieces(NamedTuple):
    """Pieces of equal size; the last one may hold padding."""

    size: int
    number: int

    @property
    def total(self) -> int:
        return self.size * self.number


def pieces(length: int, most: int) -> Pieces:
    """Cut `length` into pieces of `most`, or into one if it is shorter."""
    size = min(length, most)
    return Pieces(size, math.ceil(length / size))


def block_size(length: int) -> int:
    """Return the length of equal blocks of at most `BLOCK` positions, the last one padded least."""
    return math.ceil(length / math.ceil(length / BLOCK))


def block_pairs(length: int, window: int | None) -> Int32[np.ndarray, "pairs 2"]:
    """List the pairs (query block, key block) in which a query sees a key, queries in order."""
    size = block_size(length)
    queries = np.arange(math.ceil(length / size))[:, None]
    keys = queries.T
    seen = keys <= queries
    if window is not None:
        # The first query of a block sees the furthest back; the last key of a block is the nearest.
        seen = seen & ((keys + 1) * size > queries * size - window + 1)
    return np.argwhere(seen).astype(np.int32)


def tile_rows(num_rows: int, num_groups: int, fewest: int, most: int) -> int:
    """Return the rows of a tile: half a tile more per group must stay a small part of the work."""
    fair = max(num_rows // (2 * num_groups), 1)
    power_of_two = 1 << (fair.bit_length() - 1)
    return min(max(power_of_two, fewest), most, num_rows)


def rest_rows(tile: int) -> int:
    """Return the most rows of a tile that a group can have if another has as many or more."""
    return max(tile // 2, 1)


def num_visits(num_rows: int, num_groups: int, tile: int) -> tuple[int, int]:
    """Return how many (tile, group) pairs a grouped product visits: largest of a tile, others."""
    return math.ceil(num_rows / tile), num_groups - 1


def visited_rows(num_rows: int, num_groups: int, fewest: int, most: int) -> int:
    """Return the rows that a grouped product multiplies: all its visits, needed or not."""
    tile = tile_rows(num_rows, num_groups, fewest, most)
    tiles, rests = num_visits(num_rows, num_groups, tile)
    return tiles * tile + rests * rest_rows(tile)


def capacity(capacity_factor: float, num_tokens: int, top_k: int) -> int:
    """Return the rows that one rank accepts from its group: one budget for all of its experts.

    The product is exact: 1.1 * 110 routes are 121 rows; in floats it is a little more, so 122.
    Source: olmo_core 3.0.0, nn/moe/v2; report, equation 23.
    """
    return max(1, math.ceil(Fraction(repr(capacity_factor)) * num_tokens * top_k))


def received_rows(num_tokens: int, top_k: int, num_ranks: int, limit: int | None) -> int:
    """Return the rows that a rank has room for: what it accepts, or all that its group can send.

    `limit=None` drops nothing; a group of one rank never does.
    """
    sent = num_ranks * num_tokens * top_k
    return sent if limit is None or num_ranks == 1 else min(limit, sent)


def num_microbatches(train: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Return the microbatches of one step, each of `train.microbatch` sequences a data rank."""
    num_data_ranks = math.prod(sizes[axis] for axis in DENSE_DATA_AXES)
    return train.global_batch // (train.microbatch * num_data_ranks)
