"""Dispatch and combine: what is kept, where rows lie, laws, gradients, dead rows."""

import json
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from olmo_jax.parallel import expert

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tail_drop_2_ranks.json").read_text())


def keep_and_maps(experts, padding_mask, num_experts, limit):
    """Return the keep matrix and each rank's route map; experts [W, t, A], padding_mask [W, t]."""
    numbered = [
        expert.number_routes(jnp.asarray(e), jnp.asarray(r), num_experts)
        for e, r in zip(experts, padding_mask, strict=True)
    ]
    num_ranks = len(experts)
    counts = jnp.stack([counts for _, counts in numbered])
    keep = expert.keep_matrix(counts.reshape(num_ranks, num_ranks, -1), limit)
    maps = [
        expert.map_routes(
            jnp.asarray(experts[me]), numbered[me][0], jnp.asarray(padding_mask[me]), keep, me
        )
        for me in range(num_ranks)
    ]
    return keep, maps


@pytest.mark.parametrize("case", range(4), ids=[f"factor_{c['cf']}" for c in GOLDEN["ranks"][0]])
def test_two_ranks_keep_and_place_what_the_reference_does(case):
    ranks = [rank[case] for rank in GOLDEN["ranks"]]
    experts = np.array([rank["route"] for rank in ranks], np.int32)
    num_tokens, top_k = GOLDEN["N"], GOLDEN["K"]
    limit = expert.capacity(ranks[0]["cf"], num_tokens, top_k)
    assert limit == ranks[0]["cap"]
    padding_mask = np.ones((2, num_tokens), bool)
    keep, maps = keep_and_maps(experts, padding_mask, 2 * GOLDEN["num_local"], limit)
    for me, wanted in enumerate(ranks):
        np.testing.assert_array_equal(keep, wanted["keep"])
        np.testing.assert_array_equal(maps[me].rank, wanted["dst_ranks"])
        np.testing.assert_array_equal(maps[me].row, wanted["dst_rows"])
        assert (np.asarray(maps[me].row) < 0).sum() == wanted["dropped"]
        np.testing.assert_array_equal(np.asarray(keep)[:, me], wanted["recv"])


def numpy_rows(experts, padding_mask, num_experts, limit):
    """Fill each rank route by route in the published order; return (rank, row) of every route."""
    num_ranks, num_tokens, top_k = experts.shape
    num_local = num_experts // num_ranks
    where = np.full((num_ranks, num_tokens, top_k, 2), -1)
    for rank in range(num_ranks):
        row = 0
        for number in range(rank * num_local, (rank + 1) * num_local):
            for source, token, slot in zip(*np.nonzero(experts == number), strict=True):
                if padding_mask[source, token] and row < limit:
                    where[source, token, slot] = rank, row
                    row += 1
    return where


def random_routes(draw, num_ranks, num_tokens, num_experts, top_k):
    """Return routes of which some experts get many and some none, and which are not padding."""
    popular = draw.random(num_experts) ** 3 + 1e-9
    popular[draw.integers(num_experts)] = 1e-9
    noise = draw.gumbel(size=(num_ranks, num_tokens, num_experts))
    experts = np.argsort(-(np.log(popular) + noise), axis=-1)[..., :top_k].astype(np.int32)
    return experts, draw.random((num_ranks, num_tokens)) < draw.choice([0.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_kept_equals_filling_each_rank_one_route_at_a_time(num_ranks, factor):
    draw = np.random.default_rng(num_ranks)
    for _ in range(5):
        experts, padding_mask = random_routes(draw, num_ranks, 9, 3 * num_ranks, 2)
        limit = expert.capacity(factor, 9, 2)
        wanted = numpy_rows(experts, padding_mask, 3 * num_ranks, limit)
        _, maps = keep_and_maps(experts, padding_mask, 3 * num_ranks, limit)
        np.testing.assert_array_equal(np.stack([m.rank for m in maps]), wanted[..., 0])
        np.testing.assert_array_equal(np.stack([m.row for m in maps]), wanted[..., 1])


@pytest.mark.parametrize(
    ("factor", "num_tokens", "top_k", "rows"),
    [(1.1, 110, 1, 121), (1.1, 55, 2, 121), (1.25, 24, 2, 60), (0.01, 1, 1, 1), (1.0, 7, 3, 21)],
)
def test_capacity_is_exact_and_at_least_one(factor, num_tokens, top_k, rows):
    assert expert.capacity(factor, num_tokens, top_k) == rows


W, T, D, E, A = 4, 6, 5, 8, 2
"""Ranks, tokens of each, width, experts, routes a token, of what runs on devices."""


@pytest.fixture(scope="module")
def on_ranks(mesh_of):
    """Return a function that runs another one on each of W ranks, along `expert`."""

    def run(function, num_ranks=W):
        spec = P("expert")
        sharded = jax.shard_map(
            function, mesh=mesh_of(expert=num_ranks), in_specs=spec, out_specs=spec
        )
        return jax.jit(sharded)

    return run


def inputs(seed, num_ranks=W):
    draw = np.random.default_rng(seed)
    experts, padding_mask = random_routes(draw, num_ranks, T, E // W * num_ranks, A)
    x = draw.normal(size=(num_ranks * T, D)).astype(np.float32)
    weights = draw.random((num_ranks * T, A)).astype(np.float32)
    pool = draw.normal(size=(E // W * num_ranks, D, D)).astype(np.float32)
    return x, experts.reshape(-1, A), weights, padding_mask.reshape(-1), pool


def multiply(pool, rows, group_sizes):
    """Pass rows through one matrix an expert; rows past the last group become zeros."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])[:, None]
    owned = (row >= (ends - group_sizes)[None]) & (row < ends[None])
    return jnp.einsum("re,rd,edf->rf", owned.astype(rows.dtype), rows, pool)


def exchanged(compute, *, factor, num_ranks=W, slices=False, axis="expert"):
    """Return what a rank runs on (x, experts, weights, padding_mask, pool): outputs and drops."""

    def run(x, experts, weights, padding_mask, pool):
        group = {"num_experts": E // W * num_ranks, "axis": axis, "num_ranks": num_ranks}
        local = partial(compute, pool)
        if slices:
            y, dropped = expert.exchange_in_slices(
                x, experts, weights, padding_mask, local, **group
            )
        else:
            y, dropped = expert.exchange(
                x, experts, weights, padding_mask, local, capacity_factor=factor, **group
            )
        return y, dropped[None]

    return run


def dense(x, experts, weights, kept, pool):
    """Multiply every token by each of its experts; a route that is not kept adds nothing."""
    outputs = jnp.einsum("td,tadf->taf", x, pool[experts])
    return jnp.einsum("ta,taf->tf", jnp.where(kept, weights, 0.0), outputs)


def kept_routes(experts, padding_mask, factor, num_ranks=W):
    limit = expert.capacity(factor, T, A) if factor else num_ranks * T * A
    where = numpy_rows(
        experts.reshape(num_ranks, T, A),
        padding_mask.reshape(num_ranks, T),
        E // W * num_ranks,
        limit,
    )
    return (where[..., 0] >= 0).reshape(-1, A)


FACTORS = [0.5, 1.0, None]


@pytest.mark.parametrize("factor", FACTORS)
def test_outputs_drops_and_gradients_equal_a_dense_formulation(factor, on_ranks):
    run = on_ranks(exchanged(multiply, factor=factor))

    def mesh_loss(x, weights, pool, others):
        y, dropped = run(x, others[0], weights, others[1], pool)
        return jnp.sum(jnp.sin(y)), (y, dropped)

    def dense_loss(x, weights, pool, others):
        y = dense(x, others[0], weights, others[1], pool)
        return jnp.sum(jnp.sin(y)), y

    gradient = jax.jit(jax.grad(mesh_loss, argnums=(0, 1, 2), has_aux=True))
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1, 2), has_aux=True))
    for seed in range(4):
        x, experts, weights, padding_mask, pool = inputs(seed)
        kept = kept_routes(experts, padding_mask, factor)
        found, (y, dropped) = gradient(x, weights, pool, (experts, padding_mask))
        wanted, dense_y = expected(x, weights, pool, (experts, kept))
        np.testing.assert_allclose(y, dense_y, atol=1e-5)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        lost = (padding_mask[:, None] & ~kept).reshape(W, -1).sum(axis=1)
        np.testing.assert_array_equal(dropped, lost)


def test_a_group_over_two_axes_is_the_group_of_their_ranks(on_ranks, mesh_of):
    both = ("expert", "sequence")
    folded = jax.shard_map(
        exchanged(multiply, factor=0.5, axis=both),
        mesh=mesh_of(expert=2, sequence=2),
        in_specs=P(both),
        out_specs=P(both),
    )
    found = jax.jit(folded)(*inputs(0))
    assert found[1].sum() > 0
    wanted = on_ranks(exchanged(multiply, factor=0.5))(*inputs(0))
    chex.assert_trees_all_equal(found, wanted)


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [0.3, 0.75, 1.25, 8.0])
def test_devices_keep_what_numpy_keeps(num_ranks, factor, on_ranks):
    run = on_ranks(exchanged(multiply, factor=factor, num_ranks=num_ranks), num_ranks)
    for seed in range(10):
        x, experts, weights, padding_mask, pool = inputs(seed, num_ranks)
        kept = kept_routes(experts, padding_mask, factor, num_ranks)
        y, dropped = run(x, experts, weights, padding_mask, pool)
        np.testing.assert_allclose(y, dense(x, experts, weights, kept, pool), atol=1e-5)
        assert dropped.sum() == (padding_mask[:, None] & ~kept).sum()


@pytest.mark.parametrize("factor", [0.5, None])
def test_combine_of_dispatch_is_the_identity_on_kept_routes(factor, on_ranks):
    def there_and_back(x, experts, padding_mask, slot):
        limit = None if factor is None else expert.capacity(factor, T, A)
        plan = expert.plan_routes(
            experts, padding_mask, num_experts=E, limit=limit, axis="expert", num_ranks=W
        )
        weights = jax.nn.one_hot(slot, A)
        return expert.combine(expert.dispatch(x, plan, "expert"), weights, plan, "expert")

    run = on_ranks(there_and_back)
    x, experts, _, padding_mask, _ = inputs(1)
    kept = kept_routes(experts, padding_mask, factor)
    for slot in range(A):
        y = run(x, experts, padding_mask, np.full(W * T, slot))
        np.testing.assert_array_equal(y, np.where(kept[:, slot, None], x, 0))


def test_rows_and_their_inverse_map_agree_and_groups_are_counted_after_drops(on_ranks):
    limit = expert.capacity(0.75, T, A)

    def plan_of(experts, padding_mask):
        plan = expert.plan_routes(
            experts, padding_mask, num_experts=E, limit=limit, axis="expert", num_ranks=W
        )
        return jax.tree.map(lambda value: value[None], plan)

    run = on_ranks(plan_of)
    for seed in range(4):
        _, experts, _, padding_mask, _ = inputs(seed)
        plans = jax.device_get(run(experts, padding_mask))
        for rank in range(W):
            plan = expert.RoutePlan(*(value[rank] for value in plans))
            rows = np.flatnonzero(plan.route_of_row >= 0)
            assert len(rows) == plan.group_sizes.sum() <= limit
            np.testing.assert_array_equal(rows, np.arange(len(rows)))
            routes = plan.route_of_row[rows]
            np.testing.assert_array_equal(plan.row_of_route.reshape(-1)[routes], rows)
            assert (plan.row_of_route >= 0).sum() == len(rows)
            owners = experts.reshape(-1)[routes] - rank * (E // W)
            np.testing.assert_array_equal(np.bincount(owners, minlength=E // W), plan.group_sizes)
            assert (np.diff(owners) >= 0).all()


def test_slices_equal_one_exchange_and_drop_nothing_whatever_the_routes(on_ranks):
    whole = on_ranks(exchanged(multiply, factor=None))
    sliced = on_ranks(exchanged(multiply, factor=None, slices=True))
    for seed in range(3):
        x, experts, weights, padding_mask, pool = inputs(seed)
        for routes in (experts, np.zeros_like(experts) + np.arange(A, dtype=np.int32)):
            y, dropped = sliced(x, routes, weights, padding_mask, pool)
            np.testing.assert_allclose(
                y, whole(x, routes, weights, padding_mask, pool)[0], atol=1e-6
            )
            assert dropped.sum() == 0


def poisoned(value, pool, rows, group_sizes):
    """Compute with `value` in the dead rows, before and after."""
    dead = jnp.arange(rows.shape[0])[:, None] >= group_sizes.sum()
    rows = jnp.where(dead, 0.0, rows)
    return jnp.where(dead, value, multiply(pool, rows, group_sizes))


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_dead_rows_reach_neither_outputs_nor_gradients(value, on_ranks):
    def value_and_gradients(compute):
        run = on_ranks(exchanged(compute, factor=1.0))

        def loss(x, weights, pool, others):
            y, _ = run(x, others[0], weights, others[1], pool)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    clean, dirty = value_and_gradients(multiply), value_and_gradients(partial(poisoned, value))
    for seed in range(2):
        x, experts, weights, padding_mask, pool = inputs(seed)
        assert kept_routes(experts, padding_mask, 1.0).sum() < W * T * A
        arguments = (x, weights, pool, (experts, padding_mask))
        chex.assert_trees_all_equal(clean(*arguments), dirty(*arguments))


def test_one_rank_drops_nothing_and_needs_no_axis():
    x, experts, weights, padding_mask, pool = inputs(0)
    y, dropped = expert.exchange(
        *map(jnp.asarray, (x, experts, weights, padding_mask)),
        partial(multiply, jnp.asarray(pool)),
        num_experts=E,
        capacity_factor=0.1,
        axis=None,
        num_ranks=1,
    )
    kept = np.broadcast_to(padding_mask[:, None], experts.shape)
    np.testing.assert_allclose(y, dense(x, experts, weights, kept, pool), atol=1e-5)
    assert dropped == 0
