"""Sizes that are fixed when a step is traced: blocks, tiles, chunks, rows received. No jax.

The operations divide their work by these functions, and the plan counts it by the same ones.
"""

import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

# The fastest of 128, 256 and 512 by tools/bench_attention.py, at 2,048 positions on a CPU.
BLOCK = 256

EMBEDDING_TILE = 128

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "bool": 1}

# Fewest and most rows. Below 64 the loop costs more than the rows that a smaller tile saves.
CPU_TILE = (64, 512)


PIECES = {"ulysses": 1, "ring": 2}
"""How many pieces of a row each `sequence` rank holds, by `parallel.context`."""

Context = Literal["ulysses", "ring"]
"""How attention sees positions of other ranks: the values of `parallel.context`."""


class Pieces(NamedTuple):
    """Pieces of equal size; the last one may hold padding."""

    size: int
    number: int

    @property
    def total(self) -> int:
        return self.size * self.number


def pieces(length: int, most: int) -> Pieces:
    """Split `length` into pieces of `most`, or into one if it is shorter."""
    size = min(length, most)
    return Pieces(size, math.ceil(length / size))


def block_size(length: int) -> int:
    """Return the length of equal blocks of at most `BLOCK` positions, the last one padded least."""
    # 300 positions: 2 blocks of 150, and not 256 + 256 with 212 of padding.
    return math.ceil(length / math.ceil(length / BLOCK))


def block_pairs(
    length: int, window: int | None, *, distance: int = 0
) -> Int32[np.ndarray, "pairs 2"]:
    """List the pairs (query block, key block) in which a query sees a key, queries in order.

    The queries' stretch of `length` positions begins `distance` after the keys' stretch.
    """
    # 2 <= window <= size + 1, 4 blocks:
    #
    #     keys       0 1 2 3
    #     queries 0  x
    #             1  x x
    #             2  . x x          .: outside the window of every query of the block
    #             3  . . x x
    #
    # A pair is listed if some query of its block sees some key: the last query (queries + size - 1)
    # is at or after the first key.
    size = block_size(length)
    queries = np.arange(math.ceil(length / size))[:, None] * size + distance
    keys = np.arange(math.ceil(length / size))[None, :] * size
    seen = keys < queries + size
    if window is not None:
        # The first query of a block sees the furthest back; the last key of a block is the nearest.
        seen = seen & (np.minimum(keys + size, length) > queries - window + 1)
    return np.argwhere(seen).astype(np.int32)


def held_pieces(context: Context, rank: Any, num_ranks: int) -> tuple[Any, ...]:
    """Return the numbers of the pieces of a row that a rank holds, in its order.

    With a ring they are one from each end, so that causal work is even.
    """
    # Ring, 2 ranks, 4 pieces. A piece sees itself and those before it:
    #
    #     piece    0  1  2  3
    #     rank     0  1  1  0
    #     sees     1  2  3  4     pieces: 1 + 4 on rank 0, 2 + 3 on rank 1
    #
    # In order (0 1 on rank 0) it would be 3 and 7, and every hop waits for the slowest rank.
    return (rank,) if PIECES[context] == 1 else (rank, 2 * num_ranks - 1 - rank)


def padded_length(length: int, context: Context, num_ranks: int) -> int:
    """Return the length of a row with padding to equal pieces; one rank needs none."""
    if num_ranks == 1:
        return length
    total = num_ranks * PIECES[context]
    return math.ceil(length / total) * total


def head_copies(num_kv_heads: int, num_ranks: int) -> int:
    """Return how many copies of each key head the ranks need to share them evenly."""
    # lcm(heads, ranks) / heads. 4 ranks, 6 heads: 2 copies of each make 12 heads, 3 a rank.
    return num_ranks // math.gcd(num_kv_heads, num_ranks)


class Hop(NamedTuple):
    """What a rank attends to when the keys it has have come over `shift` ranks: pairs of blocks.

    `across`: queries of its second piece, keys of the first piece. `within`: of its own keys,
    queries and keys of the same piece; of other keys, both of the first pieces or both of the
    second ones, by which rank is further.
    """

    shift: int
    across: Int32[np.ndarray, "pairs 2"]
    within: Int32[np.ndarray, "pairs 2"]


def ring_hops(piece: int, num_ranks: int, window: int | None) -> tuple[Hop, ...]:
    """Return the hops of a ring, own keys first; those in which no rank has a pair are left out.

    All ranks run one program, so each hop has the pairs of the rank that has most of them: the one
    whose pieces are nearest. `piece` is the length of a piece.
    """
    # The nearest pair of pieces sees the most under a window, so its blocks include those of every
    # other rank, which masks what it does not see. Without a window only distance 0 is different.
    hops = []
    for shift in range(num_ranks):
        others = [(rank - shift) % num_ranks for rank in range(num_ranks)]
        across = min(2 * num_ranks - 1 - me - other for me, other in enumerate(others))
        within = min(abs(me - other) for me, other in enumerate(others))
        hop = Hop(
            shift,
            block_pairs(piece, window, distance=across * piece),
            block_pairs(piece, window, distance=within * piece),
        )
        if len(hop.across) or len(hop.within):
            hops.append(hop)
    return tuple(hops)


def tile_rows(num_rows: int, num_groups: int, fewest: int, most: int) -> int:
    """Return the rows of a tile: half a tile more per group must stay a small part of the work."""
    # The rests multiply up to (E - 1) tile / 2 rows. With tile <= rows / (2 E) that is below a
    # quarter of the rows.
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
