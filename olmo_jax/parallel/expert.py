"""Expert parallelism: routed rows go to the rank that holds their expert, and come back.

Everything is decided from counts before a row moves: an all-gather of requested counts gives every
rank the same keep matrix, and from it each route's destination row. A transport then moves rows:
`dispatch` to the experts, `combine` back. Both are gathers in both directions, since the map and
its inverse are both known; nothing is scattered with repeated indices.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.arch.sizes import capacity, received_rows
from olmo_jax.ops.varying import like

Axes = str | tuple[str, ...] | None
"""The mesh axes that the group spans; None for a group of one rank."""

Experts = Callable[[Float[Array, "R D"], Int32[Array, " e"]], Float[Array, "R D"]]
"""The local experts: (rows sorted by expert, rows of each) to rows; rows past the last are dead."""


class RoutePlan(NamedTuple):
    """Where rows go. `W` ranks in the group, `t` tokens each, `A` routes a token.

    `row_of_route[i, a]` is the row, here, of route a of the group's token i; -1 if it went
    elsewhere or was dropped. `route_of_row[r]` is i * A + a, or -1 for an empty row.
    """

    row_of_route: Int32[Array, "Wt A"]
    route_of_row: Int32[Array, " R"]
    group_sizes: Int32[Array, " e"]
    dropped: Int32[Array, ""]


def keep_matrix(requested: Int32[Array, "W W e"], limit: int) -> Int32[Array, "W W e"]:
    """Return how many of the [source, destination, local expert] routes are accepted.

    Per destination, in the order (local expert, source): what exceeds `limit` is dropped from the
    tail. Source: olmo_core 3.0.0, nn/moe/v2, tail drop.
    """
    # One destination with 2 experts, 2 sources, limit 3:
    #
    #     (expert, source)    (0,0) (0,1) (1,0) (1,1)
    #     requested             2     1     1     2
    #     ends, at most 3       2     3     3     3      cumulative sums 2 3 4 6
    #     accepted              2     1     0     0      differences: the tail is dropped
    #
    # Every rank computes this for all destinations from the same counts, so nobody has to be told
    # which of its routes were dropped.
    num_sources, num_ranks, num_local = requested.shape
    chunks = requested.transpose(1, 2, 0).reshape(num_ranks, num_local * num_sources)
    ends = jnp.minimum(jnp.cumsum(chunks, axis=1), limit)
    kept = jnp.diff(ends, axis=1, prepend=0)
    return kept.reshape(num_ranks, num_local, num_sources).transpose(2, 0, 1)


def number_routes(
    experts: Int32[Array, "t A"], padding_mask: Bool[Array, " t"], num_experts: int
) -> tuple[Int32[Array, "t A"], Int32[Array, " E"]]:
    """Return each route's number among this rank's routes to the same expert, and the counts.

    Routes are numbered token by token, slot by slot; those of padding come last, in no count.
    """
    #     owner            2 0 2 1     the expert of each route
    #     order            1 3 0 2     by expert, then as they come: the sort is stable
    #     rank_in_order    2 0 3 1     the inverse permutation
    #     starts           0 1 2       of experts 0, 1, 2 in that order
    #     number           0 0 1 0     rank_in_order - starts[owner]
    #
    # A one-hot cumulative sum gives the same numbers, from [t A, E] integers.
    owner = jnp.where(padding_mask[:, None], experts, num_experts).reshape(-1)
    order = jnp.argsort(owner, stable=True)
    rank_in_order = (
        jnp.zeros_like(order)
        .at[order]
        .set(like(jnp.arange(order.size, dtype=order.dtype), order), unique_indices=True)
    )
    ids = jnp.arange(num_experts + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(owner[order], ids, method="compare_all").astype(jnp.int32)
    number = rank_in_order.astype(jnp.int32) - jnp.append(starts[:-1], 0)[owner]
    return number.reshape(experts.shape), jnp.diff(starts)


class RouteMap(NamedTuple):
    """Destination rank and row of each route; -1 where it was dropped or its token is padding."""

    rank: Int32[Array, "t A"]
    row: Int32[Array, "t A"]


def map_routes(
    experts: Int32[Array, "t A"],
    number: Int32[Array, "t A"],
    padding_mask: Bool[Array, " t"],
    keep: Int32[Array, "W W e"],
    me: Int32[Array, ""] | int,
) -> RouteMap:
    """Return where this rank's routes land.

    The destination has its rows expert by expert, within an expert source by source, within a
    source in route order, without gaps. Source: olmo_core 3.0.0, nn/moe/v2, rowwise route maps.
    """
    # With the numbers of `keep_matrix` the destination has 3 rows:
    #
    #     row       0    1    2
    #     expert    0    0    0
    #     source    0    0    1     row = base[expert] + rows of earlier sources + route number
    #
    # A route is accepted if its number is below what its (source, expert) may send.
    num_local = keep.shape[2]
    rank, local = experts // num_local, experts % num_local
    per_expert = keep.sum(axis=0)
    base = jnp.cumsum(per_expert, axis=1) - per_expert
    earlier = jnp.cumsum(keep, axis=0) - keep
    start = base + earlier[me]
    kept = (number < keep[me][rank, local]) & padding_mask[:, None]
    return RouteMap(jnp.where(kept, rank, -1), jnp.where(kept, start[rank, local] + number, -1))


def _gather(value: Array, axis: Axes) -> Array:
    """Comm: an all-gather along `axis`; without one, the group is this rank alone."""
    return value if axis is None else lax.all_gather(value, axis, axis=0, tiled=True)


def _sum_scatter(value: Float32[Array, "Wt ..."], axis: Axes) -> Float32[Array, "t ..."]:
    """Comm: an FP32 reduce-scatter along `axis`."""
    if axis is None:
        return value
    return lax.psum_scatter(value, axis, scatter_dimension=0, tiled=True)


def plan_routes(
    experts: Int32[Array, "t A"],
    padding_mask: Bool[Array, " t"],
    *,
    num_experts: int,
    limit: int | None,
    axis: Axes,
    num_ranks: int,
) -> RoutePlan:
    """Decide which routes are kept, and the row of each.

    `limit` is the rows a rank accepts; None drops nothing, and nor does a group of one rank.
    Comm: along `axis`, all-gathers of E counts and of 8 bytes a route.
    """
    num_tokens, top_k = experts.shape
    num_rows = received_rows(num_tokens, top_k, num_ranks, limit)
    number, counts = number_routes(experts, padding_mask, num_experts)
    me = 0 if axis is None else lax.axis_index(axis)
    with jax.named_scope("exchange_counts"):
        requested = _gather(counts, axis).reshape(num_ranks, num_ranks, num_experts // num_ranks)
        keep = keep_matrix(requested, num_rows)
        mine = map_routes(experts, number, padding_mask, keep, me)
        rank, row = _gather(mine.rank, axis), _gather(mine.row, axis)
    # The map in both directions: `here` has each route's row, `route_of_row` each row's route.
    # A transport reads by one of them forward and by the other backward, and never scatters rows.
    here = jnp.where(rank == me, row, -1)
    route = like(jnp.arange(here.size, dtype=jnp.int32), here)
    # A route that is not here gets an index past the end, a different one each, and is dropped.
    target = jnp.where(here < 0, num_rows + route.reshape(here.shape), here).reshape(-1)
    empty = like(jnp.full(num_rows, -1, jnp.int32), here)
    route_of_row = empty.at[target].set(route, mode="drop", unique_indices=True)
    asked = padding_mask.sum(dtype=jnp.int32) * top_k
    dropped = asked - (mine.row >= 0).sum(dtype=jnp.int32)
    here, route_of_row, group_sizes = (
        checkpoint_name(part, "route_plan")
        for part in (here, route_of_row, keep[:, me].sum(axis=0))
    )
    return RoutePlan(here, route_of_row, group_sizes, checkpoint_name(dropped, "route_plan"))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x: Float[Array, "t D"], plan: RoutePlan, axis: Axes) -> Float[Array, "R D"]:
    """Return the rows of this rank's experts, out of all tokens of the group.

    Rows past the last accepted one hold some token's values: nothing may read them.
    Comm: along `axis`, an all-gather of x in its dtype; backward an FP32 reduce-scatter of [Wt, D].
    """
    top_k = plan.row_of_route.shape[1]
    with jax.named_scope("dispatch"):
        return _gather(x, axis)[jnp.maximum(plan.route_of_row, 0) // top_k]


def _dispatch_forward(
    x: Float[Array, "t D"], plan: RoutePlan, axis: Axes
) -> tuple[Float[Array, "R D"], tuple[RoutePlan, Float[Array, "0"]]]:
    # The backward needs the dtype of x and not x: an empty array carries it.
    return dispatch(x, plan, axis), (plan, like(jnp.zeros(0, x.dtype), x))


def _rows_of_routes(
    rows: Float[Array, "R D"], plan: RoutePlan, slot: int
) -> Float32[Array, "Wt D"]:
    """Return, for slot `slot` of each token, its row in FP32, or zero if it has none here."""
    index = plan.row_of_route[:, slot]
    taken = rows[jnp.maximum(index, 0)].astype(jnp.float32)
    return jnp.where((index >= 0)[:, None], taken, 0.0)


def _dispatch_backward(
    axis: Axes, saved: tuple[RoutePlan, Float[Array, "0"]], cotangent: Float[Array, "R D"]
) -> tuple[Float[Array, "t D"], None]:
    plan, marker = saved
    slots = range(plan.row_of_route.shape[1])
    with jax.named_scope("dispatch_backward"):
        total = sum(
            (_rows_of_routes(cotangent, plan, slot) for slot in slots[1:]),
            _rows_of_routes(cotangent, plan, 0),
        )
        return _sum_scatter(total, axis).astype(marker.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(
    rows: Float[Array, "R D"], weights: Float32[Array, "t A"], plan: RoutePlan, axis: Axes
) -> Float[Array, "t D"]:
    """Return each token's weighted sum of its rows: FP32 in slot order, one rounding at the end.

    A dropped route adds zero; the others keep their weights.
    Comm: along `axis`, an all-gather of the weights, an FP32 reduce-scatter of [Wt, D]; backward
    an all-gather of the cotangent in its dtype, an FP32 reduce-scatter of [Wt, A].
    Source: olmo_core 3.0.0, nn/moe/v2 (row-wise combine).
    """
    with jax.named_scope("combine"):
        # Slot by slot: all slots at once would be an FP32 array of [W t, A, D].
        scale = _gather(weights, axis)
        total = scale[:, :1] * _rows_of_routes(rows, plan, 0)
        for slot in range(1, scale.shape[1]):
            total = total + scale[:, slot, None] * _rows_of_routes(rows, plan, slot)
        return _sum_scatter(total, axis).astype(rows.dtype)


def _combine_forward(
    rows: Float[Array, "R D"], weights: Float32[Array, "t A"], plan: RoutePlan, axis: Axes
) -> tuple[Float[Array, "t D"], tuple[Float[Array, "R D"], Float32[Array, "t A"], RoutePlan]]:
    return combine(rows, weights, plan, axis), (rows, weights, plan)


def _combine_backward(
    axis: Axes,
    saved: tuple[Float[Array, "R D"], Float32[Array, "t A"], RoutePlan],
    cotangent: Float[Array, "t D"],
) -> tuple[Float[Array, "R D"], Float32[Array, "t A"], None]:
    rows, weights, plan = saved
    with jax.named_scope("combine_backward"):
        scale, outer = _gather(weights, axis), _gather(cotangent, axis)
        # d_rows is by row, d_weights by route: each is a gather by its map.
        held = plan.route_of_row >= 0
        route = jnp.maximum(plan.route_of_row, 0)
        top_k = scale.shape[1]
        d_rows = scale.reshape(-1)[route][:, None] * outer[route // top_k].astype(jnp.float32)
        d_rows = jnp.where(held[:, None], d_rows, 0.0).astype(rows.dtype)
        wide = outer.astype(jnp.float32)
        slots = [jnp.sum(_rows_of_routes(rows, plan, slot) * wide, axis=1) for slot in range(top_k)]
        d_weights = _sum_scatter(jnp.stack(slots, axis=1), axis)
    return d_rows, d_weights, None


combine.defvjp(_combine_forward, _combine_backward)


def exchange(
    x: Float[Array, "t D"],
    experts: Int32[Array, "t A"],
    weights: Float32[Array, "t A"],
    padding_mask: Bool[Array, " t"],
    compute: Experts,
    *,
    num_experts: int,
    capacity_factor: float | None,
    axis: Axes,
    num_ranks: int,
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
    """Pass tokens through the routed experts of the group; also return how many routes dropped.

    `capacity_factor=None` drops nothing; a group of one rank never does.
    """
    limit = None if capacity_factor is None else capacity(capacity_factor, *experts.shape)
    plan = plan_routes(
        experts, padding_mask, num_experts=num_experts, limit=limit, axis=axis, num_ranks=num_ranks
    )
    rows = checkpoint_name(dispatch(x, plan, axis), "expert_rows")
    y = combine(compute(rows, plan.group_sizes), weights, plan, axis)
    return checkpoint_name(y, "combined"), plan.dropped


def exchange_in_slices(
    x: Float[Array, "t D"],
    experts: Int32[Array, "t A"],
    weights: Float32[Array, "t A"],
    padding_mask: Bool[Array, " t"],
    compute: Experts,
    *,
    num_experts: int,
    axis: Axes,
    num_ranks: int,
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
    """Pass tokens through the experts and drop nothing, in as many slices as the group has ranks.

    If all routes of a slice meet on one rank they fill what training holds at capacity 1.
    """
    size = -(-x.shape[0] // num_ranks)
    pad = size * num_ranks - x.shape[0]

    def to_slices(value: Array) -> Array:
        padded = jnp.pad(value, [(0, pad)] + [(0, 0)] * (value.ndim - 1))
        return padded.reshape(num_ranks, size, *value.shape[1:])

    def one(total: Int32[Array, ""], part: tuple[Array, ...]) -> tuple[Int32[Array, ""], Array]:
        rows, choice, scale, mask = part
        y, dropped = exchange(
            rows,
            choice,
            scale,
            mask,
            compute,
            num_experts=num_experts,
            capacity_factor=None,
            axis=axis,
            num_ranks=num_ranks,
        )
        return total + dropped, y

    parts = tuple(to_slices(value) for value in (x, experts, weights, padding_mask))
    dropped, y = lax.scan(one, like(jnp.zeros((), jnp.int32), x), parts)
    return y.reshape(-1, x.shape[1])[: x.shape[0]], dropped
