"""Context parallelism: the positions of a row are divided over the `sequence` ranks.

Everything but attention works on this rank's positions. Attention sees the others in one of two
ways. Ulysses exchanges positions for heads: each rank attends with a share of the heads to whole
rows. A ring leaves the queries where they are and sends keys and values round. The method decides
which pieces of a row a rank holds: see `held_pieces`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Int32

from olmo_jax.arch.sizes import PIECES, Context, Hop, head_copies, held_pieces, ring_hops
from olmo_jax.ops import blockwise as blocks
from olmo_jax.ops.varying import like

SEQUENCE = "sequence"

Attend = Callable[..., Float[Array, "B L N H"]]
"""Attention over whole rows: `ops.attention.attention`."""


def piece_starts(
    method: Context, rank: Int[Array, ""] | int, num_ranks: int, num_local: int
) -> Int32[Array, " pieces"]:
    """Return the position in the row at which each piece of a rank begins."""
    length = num_local // PIECES[method]
    pieces = held_pieces(method, rank, num_ranks)
    return jnp.stack([jnp.asarray(piece, jnp.int32) for piece in pieces]) * length


def offsets(method: Context, num_ranks: int, num_local: int) -> Int32[Array, " l"]:
    """Return the index in the row of each position that this rank holds."""
    starts = piece_starts(method, lax.axis_index(SEQUENCE), num_ranks, num_local)
    inside = jnp.arange(num_local // PIECES[method], dtype=jnp.int32)
    return (starts[:, None] + inside).reshape(-1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_heads(x: Float[Array, "B l K H"], times: int) -> Float[Array, "B l Kr H"]:
    """Repeat each head; the gradients of its copies are summed in FP32."""
    return jnp.repeat(x, times, axis=2)


def _copy_forward(x: Array, times: int) -> tuple[Array, None]:
    return copy_heads(x, times), None


def _copy_backward(times: int, _: None, d_copies: Array) -> tuple[Array]:
    apart = d_copies.reshape(*d_copies.shape[:2], -1, times, d_copies.shape[3])
    return (apart.astype(jnp.float32).sum(axis=3).astype(d_copies.dtype),)


copy_heads.defvjp(_copy_forward, _copy_backward)


def _to_heads(x: Float[Array, "*stacked B l N H"]) -> Float[Array, "*stacked B L n H"]:
    """Give positions for heads. Comm: an all-to-all over `sequence`, and one backward."""
    with jax.named_scope("to_heads"):
        return lax.all_to_all(x, SEQUENCE, x.ndim - 2, x.ndim - 3, tiled=True)


def _to_positions(x: Float[Array, "B L n H"]) -> Float[Array, "B l N H"]:
    """Give heads for positions. Comm: an all-to-all over `sequence`, and one backward."""
    with jax.named_scope("to_positions"):
        return lax.all_to_all(x, SEQUENCE, 1, 2, tiled=True)


def ulysses(
    q: Float[Array, "B l N H"],
    k: Float[Array, "B l K H"],
    v: Float[Array, "B l K H"],
    *,
    segment_ids: Int[Array, "B L"] | None,
    window: int | None,
    scale: float,
    num_ranks: int,
    attend: Attend,
) -> Float[Array, "B l N H"]:
    """Attend to whole rows with a share of the heads; `segment_ids` are those of whole rows.

    A key head that several ranks need goes to each of them.
    Comm: three all-to-alls over `sequence`, of q, of k and v together, of the result, and three
    backward: each way B l H (2 N + 2 K r) (c-1)/c elements sent, c ranks, r copies of a key head.
    Source: Jacobs et al. 2023, DeepSpeed-Ulysses; olmo_core 3.0.0, nn/attention/ring.
    Differs: there the ranks must divide the key heads.
    """
    copies = head_copies(k.shape[2], num_ranks)
    # Stacked, k and v go in one all-to-all: half the calls, and the same bytes.
    pair = jnp.stack([copy_heads(x, copies) if copies > 1 else x for x in (k, v)])
    q = checkpoint_name(_to_heads(q), "exchanged_query")
    k, v = checkpoint_name(_to_heads(pair), "exchanged_key_value")
    out = attend(q, k, v, segment_ids=segment_ids, window=window, scale=scale)
    return checkpoint_name(_to_positions(out), "exchanged_attention")


Pair = tuple[Array, Array]
"""Keys and values, or their gradients."""


@dataclass(frozen=True)
class _Ring:
    """The static side of one ring attention."""

    num_ranks: int
    window: int | None
    scale: float

    def hops(self, num_local: int) -> tuple[Hop, ...]:
        return ring_hops(num_local // PIECES["ring"], self.num_ranks, self.window)

    def begins(self, rank: Array, num_local: int) -> Int32[Array, " blocks"]:
        starts = piece_starts("ring", rank, self.num_ranks, num_local)
        return blocks.block_begins(starts, num_local // PIECES["ring"])

    def queries(self, q: Array, segments: Array, num_kv_heads: int) -> blocks.Queries:
        return blocks.Queries(
            _to_blocks(q, num_kv_heads),
            self.begins(self.owner(0), q.shape[1]),
            self.segments_of(segments, 0),
        )

    def keys(self, pair: Pair, segments: Array, shift: int) -> blocks.Keys:
        """Return the blocks of keys and values that have come over `shift` ranks."""
        k, v = pair
        return blocks.Keys(
            _to_blocks(k, k.shape[2]),
            _to_blocks(v, k.shape[2]),
            self.begins(self.owner(shift), k.shape[1]),
            self.segments_of(segments, shift),
        )

    def segments_of(self, segments: Array, shift: int) -> Array | None:
        num_local = segments.shape[1] // self.num_ranks
        begin = self.owner(shift) * num_local
        held = lax.dynamic_slice_in_dim(segments, begin, num_local, axis=1)
        return blocks.segment_blocks(held, pieces=PIECES["ring"])

    def owner(self, shift: int) -> Int[Array, ""]:
        """Return the rank whose keys have come over `shift` ranks to this one."""
        return (lax.axis_index(SEQUENCE) - shift) % self.num_ranks

    def send(self, tree: Any, shift: int) -> Any:
        """Send arrays `shift` ranks on. Comm: a permute of each over `sequence`."""
        route = [(rank, (rank + shift) % self.num_ranks) for rank in range(self.num_ranks)]
        with jax.named_scope("ring"):
            return jax.tree.map(lambda x: lax.ppermute(x, SEQUENCE, route), tree)

    def pairs(self, hop: Hop, num_blocks: int) -> Int[Array, "pairs 2"]:
        """Return this rank's pairs of blocks; the second piece's blocks follow the first's."""
        # Rank r holds pieces r and 2P - 1 - r of a row: see `held_pieces`. With keys of rank o,
        #
        #                        first keys, o    second keys, 2P - 1 - o
        #     first queries, r   if o < r         never
        #     second queries     always           if o > r
        #
        # so each rank has two of the four pairs of pieces in every hop: even work. Of its own keys
        # (o = r) it has both on the diagonal, by their causal halves.
        second = num_blocks // 2
        across = hop.across + jnp.array([second, 0], jnp.int32)
        first, last = jnp.asarray(hop.within), jnp.asarray(hop.within) + second
        if hop.shift == 0:
            return jnp.concatenate([first, last, across])
        earlier = self.owner(hop.shift) < lax.axis_index(SEQUENCE)
        return jnp.concatenate([across, jnp.where(earlier, first, last)])


def _to_blocks(x: Array, num_kv_heads: int) -> Array:
    return blocks.to_blocks(x, num_kv_heads, pieces=2)


def _from_blocks(x: Array, like: Array, dtype: Any) -> Array:
    return blocks.from_blocks(x, like.shape, dtype, pieces=2)


RingResiduals = tuple[Array, Array, Array, Array, Array, Array]


def _ring_forward(
    q: Array, k: Array, v: Array, segments: Array, ring: _Ring
) -> tuple[Array, RingResiduals]:
    queries = ring.queries(q, segments, k.shape[2])

    def add(state: blocks.SoftmaxState, pair: Pair, hop: Hop) -> blocks.SoftmaxState:
        keys, pairs = ring.keys(pair, segments, hop.shift), ring.pairs(hop, len(queries.blocks))
        limits = {"window": ring.window, "scale": ring.scale}
        return blocks.add_pairs(state, pairs, queries, keys, **limits)

    hops, pair = ring.hops(q.shape[1]), (k, v)
    state = add(blocks.empty_state(queries), pair, hops[0])
    for before, hop in pairwise(hops):
        pair = ring.send(pair, hop.shift - before.shift)
        state = add(state, pair, hop)
    attended, logsumexp = blocks.finish(state)
    out = checkpoint_name(_from_blocks(attended, q, q.dtype), "attention")
    logsumexp = checkpoint_name(logsumexp, "attention_logsumexp")
    return out, (q, k, v, segments, out, logsumexp)


def _ring_backward(
    ring: _Ring, saved: RingResiduals, d_out: Array
) -> tuple[Array, Array, Array, None]:
    """Send keys and values round again, and after them the gradients that they have so far."""
    q, k, v, segments, out, logsumexp = saved
    queries = ring.queries(q, segments, k.shape[2])
    result = blocks.softmaxed(_to_blocks(out, k.shape[2]), _to_blocks(d_out, k.shape[2]), logsumexp)

    def add(dq: Array | None, pair: Pair, hop: Hop) -> tuple[Array, Pair]:
        keys, pairs = ring.keys(pair, segments, hop.shift), ring.pairs(hop, len(queries.blocks))
        start = blocks.no_gradients(queries, keys)
        start = start if dq is None else start._replace(q=dq)
        limits = {"window": ring.window, "scale": ring.scale}
        found = blocks.add_gradients(start, pairs, queries, result, keys, **limits)
        return found.q, (
            _from_blocks(found.k, k, jnp.float32),
            _from_blocks(found.v, v, jnp.float32),
        )

    # 3 ranks, as rank r sees it. dq stays; gradients of keys follow them one hop behind:
    #
    #     hop 0    keys of r        home = gradients of r's keys by r's queries
    #     hop 1    keys of r - 1    away = those of r - 1's keys by r's queries
    #     hop 2    keys of r - 2    away = arrived from r - 1, which had these keys before, + by r's
    #     home     away goes on to the rank of its keys, and is added to home there
    #
    # So a gradient travels as far as its keys, and the permutes hide behind the next hop's work.
    hops, pair = ring.hops(q.shape[1]), (k, v)
    dq, home = add(None, pair, hops[0])
    away = None
    for before, hop in pairwise(hops):
        pair = ring.send(pair, hop.shift - before.shift)
        arrived = None if away is None else ring.send(away, hop.shift - before.shift)
        dq, here = add(dq, pair, hop)
        away = here if arrived is None else jax.tree.map(jnp.add, arrived, here)
    if away is not None:
        back = ring.send(away, ring.num_ranks - hops[-1].shift)
        home = jax.tree.map(jnp.add, home, back)
    dk, dv = (gradient.astype(k.dtype) for gradient in home)
    return _from_blocks(dq, q, q.dtype), dk, dv, None


def _ring_value(q: Array, k: Array, v: Array, segments: Array, ring: _Ring) -> Array:
    return _ring_forward(q, k, v, segments, ring)[0]


_ring = jax.custom_vjp(_ring_value, nondiff_argnums=(4,))
_ring.defvjp(_ring_forward, _ring_backward)


def ring(
    q: Float[Array, "B l N H"],
    k: Float[Array, "B l K H"],
    v: Float[Array, "B l K H"],
    *,
    segment_ids: Int[Array, "B L"] | None,
    window: int | None,
    scale: float,
    num_ranks: int,
) -> Float[Array, "B l N H"]:
    """Attend to the keys of all ranks, which come round; `segment_ids` are those of whole rows.

    Each rank holds one piece from either end of the row. Hops in which no rank sees a key of its
    window are not made. Backward sends keys and values round again.
    Comm: permutes over `sequence`, in each hop k and v; backward the same again, and the FP32
    gradients of k and v behind them and home.
    Source: Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention (even work);
    the layout is that of olmo_core 3.0.0, ring attention's zig-zag load balancer.
    """
    if segment_ids is None:
        # They also say where a piece ends.
        shape = (q.shape[0], q.shape[1] * num_ranks)
        segment_ids = like(jnp.zeros(shape, jnp.int32), q)
    return _ring(q, k, v, segment_ids, _Ring(num_ranks, window, scale))
