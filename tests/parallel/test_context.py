"""Ulysses and ring against one device: values, gradients, bytes, and what a window leaves out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from olmo_jax.arch import sizes
from olmo_jax.arch.sizes import block_size, ring_hops
from olmo_jax.data.sequence_layout import row_order
from olmo_jax.inspect import jaxpr
from olmo_jax.ops.attention import attention
from olmo_jax.parallel import context

SCALE = 0.3
POSITIONS = P(None, "sequence")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Pieces of several blocks each, of which the last one is not whole."""
    monkeypatch.setattr(sizes, "BLOCK", 3)


def inputs(length, heads, kv_heads, *, width=4, rows=2, dtype="float32"):
    draw = np.random.default_rng(length + heads)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, width), (heads, width)]
    return [draw.normal(size=(rows, length, *shape)).astype(dtype) for shape in shapes]


def documents(length, *, rows=2):
    """Borders at odd positions; a document over several ranks; row 1 ends in padding."""
    draw = np.random.default_rng(length)
    ids = np.cumsum(draw.random((rows, length)) < 0.2, axis=1).astype(np.int32)
    ids[0, : length // 2 + 1] = 0
    ids[1, -3:] = -1
    return ids


def on_ranks(method, num_ranks, mesh, *, window, segmented=True):
    """Return the mapped attention of (q, k, v, segment ids) as the method lays rows out."""

    def attend(q, k, v, segment_ids):
        given = {"window": window, "scale": SCALE, "num_ranks": num_ranks}
        whole = segment_ids if segmented else None
        if method == "ring":
            return context.ring(q, k, v, segment_ids=whole, **given)
        given["attend"] = partial(attention, backend="blockwise")
        return context.ulysses(q, k, v, segment_ids=whole, **given)

    return jax.shard_map(attend, mesh=mesh, in_specs=(*(POSITIONS,) * 3, P()), out_specs=POSITIONS)


def value_and_gradients(attend, q, k, v, d_out, segment_ids):
    def run(q, k, v, d_out, segment_ids):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, segment_ids), q, k, v)
        return out, *pull(d_out)

    return [np.asarray(x) for x in jax.jit(run)(q, k, v, d_out, segment_ids)]


def assert_one_device(method, num_ranks, mesh, length, heads, window, segment_ids):
    given = inputs(length, *heads)
    ids = np.zeros((2, length), np.int32) if segment_ids is None else segment_ids
    order = row_order(length, method, num_ranks)
    laid_out = [x[:, order] for x in (*given, ids)]
    mapped = on_ranks(method, num_ranks, mesh, window=window, segmented=segment_ids is not None)
    found = value_and_gradients(mapped, *laid_out)
    alone = partial(attention, window=window, scale=SCALE, backend="dense")
    wanted = value_and_gradients(lambda q, k, v, s: alone(q, k, v, segment_ids=s), *given, ids)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        np.testing.assert_allclose(a, b[:, order], rtol=1e-5, atol=2e-6, err_msg=name)


# Heads and key heads: as many as ranks, fewer, and a number that does not divide them.
HEADS = {2: [(4, 2), (2, 1), (6, 3)], 4: [(4, 4), (4, 2), (4, 1), (12, 6)]}
CASES = [
    (method, num_ranks, heads, window)
    for method in ("ulysses", "ring")
    for num_ranks, several in HEADS.items()
    for heads in several
    for window in ((9,) if heads == (12, 6) else (None, 5))
]
QUICK = {
    ("ulysses", 4, (4, 1), None),
    ("ulysses", 4, (12, 6), 9),
    ("ring", 2, (4, 2), 5),
    ("ring", 4, (4, 1), None),
    ("ring", 4, (4, 2), 5),
}


@pytest.mark.parametrize(
    ("method", "num_ranks", "heads", "window"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.matrix) for c in CASES],
)
def test_attention_of_packed_documents_is_one_devices(method, num_ranks, heads, window, mesh_of):
    mesh = mesh_of(sequence=num_ranks)
    length = 40 if num_ranks == 4 else 28
    assert_one_device(method, num_ranks, mesh, length, heads, window, documents(length))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_attention_of_one_document_is_one_devices(method, mesh_of):
    assert_one_device(method, 2, mesh_of(sequence=2), 20, (4, 2), None, None)


def pairs_seen(length, num_ranks, window):
    """Return by shift the ((query rank, position), (key rank, position)) of every allowed pair."""
    order = row_order(length, "ring", num_ranks).reshape(num_ranks, -1)
    seen = {}
    for me, shift in np.ndindex(num_ranks, num_ranks):
        other = (me - shift) % num_ranks
        distance = order[me][:, None] - order[other][None, :]
        allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        seen.setdefault(shift, []).append(allowed)
    return seen


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 12, 13, 14, 20, 26, 47])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_makes_the_hops_that_see_something_with_the_blocks_that_do(num_ranks, window):
    piece = 6
    size, per_piece = block_size(piece), 2
    seen = pairs_seen(2 * num_ranks * piece, num_ranks, window)
    hops = {hop.shift: hop for hop in ring_hops(piece, num_ranks, window)}
    assert set(hops) == {shift for shift, ranks in seen.items() if any(a.any() for a in ranks)}
    for shift, hop in hops.items():
        across, within = set(), set()
        for me, allowed in enumerate(seen[shift]):
            block = allowed.reshape(2 * per_piece, size, 2 * per_piece, size).any(axis=(1, 3))
            for query, key in np.argwhere(block).tolist():
                same = query // per_piece == key // per_piece
                assert same or query >= per_piece, (me, shift, query, key)
                (within if same else across).add((query % per_piece, key % per_piece))
        assert {tuple(pair) for pair in hop.across.tolist()} == across
        assert {tuple(pair) for pair in hop.within.tolist()} == within


def test_every_rank_of_a_ring_has_as_much_causal_work():
    length, num_ranks = 48, 4
    seen = pairs_seen(length, num_ranks, None)
    work = [sum(ranks[me].sum() for ranks in seen.values()) for me in range(num_ranks)]
    assert work == [length * (length + 1) // 2 // num_ranks] * num_ranks


def traced(method, num_ranks, mesh, heads, window, *, length=40, dtype="bfloat16", rows=2):
    """Return the collectives of (forward, forward and backward) by (kind, dtype): count, bytes."""
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in inputs(length, *heads, rows=rows))
    ids = jnp.asarray(documents(length))
    mapped = on_ranks(method, num_ranks, mesh, window=window)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda *qkv: mapped(*qkv, ids), q, k, v)
        return out, pull(d_out)

    sizes = dict(mesh.shape)
    found = []
    for function, args in (
        (lambda q, k, v: mapped(q, k, v, ids), (q, k, v)),
        (both, (q, k, v, d_out)),
    ):
        totals = {}
        program = jaxpr.live(jax.make_jaxpr(function)(*args))
        for c in jaxpr.collectives(program, sizes):
            count, sent = totals.get((c.kind, c.dtype), (0, 0.0))
            sent += c.count * jaxpr.ring_bytes(c, sizes)
            totals[c.kind, c.dtype] = (count + c.count, sent)
        found.append(totals)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "heads", "copies"),
    [(2, (4, 2), 1), (4, (4, 2), 2), (4, (4, 1), 4), (4, (12, 6), 2), (4, (4, 4), 1)],
)
def test_all_to_alls_send_what_the_formula_says(num_ranks, heads, copies, mesh_of):
    forward, both = traced("ulysses", num_ranks, mesh_of(sequence=num_ranks), heads, 5)
    rows, local, width = 2, 40 // num_ranks, 4
    elements = rows * local * width * (2 * heads[0] + 2 * heads[1] * copies)
    sent = 2 * elements * (num_ranks - 1) / num_ranks
    assert forward["all_to_all", "bfloat16"] == (3, sent)
    assert both["all_to_all", "bfloat16"] == (6, 2 * sent)
    assert forward.keys() == both.keys() == {("all_to_all", "bfloat16")}


@pytest.mark.parametrize(("window", "num_hops"), [(None, 3), (11, 3), (6, 2), (1, 0)])
def test_a_ring_sends_keys_and_values_and_their_gradients_behind_them(window, num_hops, mesh_of):
    """A window of one piece and one more reaches into the neighbours' pieces only."""
    forward, both = traced("ring", 4, mesh_of(sequence=4), (4, 2), window)
    elements = num_hops * 2 * 10 * 2 * 4
    once = (2 * num_hops, 2.0 * 2 * elements)
    twice_and_gradients = (2 * once[0], 2 * once[1]), (2 * num_hops, 2.0 * 4 * elements)
    kinds = [("permute", "bfloat16"), ("permute", "float32")]
    if num_hops == 0:
        assert forward == both == {}
        return
    assert forward == {kinds[0]: once}
    assert [both[kind] for kind in kinds] == list(twice_and_gradients)


def test_a_ring_keeps_its_inputs_its_result_and_the_normaliser_and_branches_nowhere(mesh_of):
    """Plain autodiff would keep the keys of every hop."""
    num_ranks, rows, heads = 4, 2, 4
    q, k, v, d_out = (jnp.asarray(x) for x in inputs(40, heads, 2))
    mapped = on_ranks("ring", num_ranks, mesh_of(sequence=num_ranks), window=None)
    ids = jnp.asarray(documents(40))
    pull = jax.eval_shape(lambda *qkv: jax.vjp(lambda *x: mapped(*x, ids), *qkv)[1], q, k, v)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    blocks_of_a_rank, size = 4, 3
    normalisers = 4 * num_ranks * blocks_of_a_rank * rows * heads * size
    assert kept == sum(x.nbytes for x in (q, q, k, v)) + normalisers + ids.nbytes
    whole = jax.make_jaxpr(lambda *x: jax.vjp(lambda *y: mapped(*y, ids), *x[:3])[1](x[3]))
    program = whole(q, k, v, d_out)
    assert jaxpr.conditionals(program) == jaxpr.unbounded_loops(program) == []


def test_gradients_of_the_copies_of_a_key_head_are_summed_in_fp32():
    """In bfloat16 the sum of 256 and 1, seven times, stays 256."""
    k = jnp.zeros((1, 1, 1, 1), jnp.bfloat16)
    d_copies = jnp.array([256.0] + [1.0] * 7, jnp.bfloat16).reshape(1, 1, 8, 1)
    (dk,) = jax.vjp(lambda x: context.copy_heads(x, 8), k)[1](d_copies)
    assert dk.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dk, jnp.bfloat16(263.0))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_positions_that_a_rank_computes_are_those_that_the_row_was_divided_by(
    method, num_ranks, mesh_of
):
    def positions():
        return context.offsets(method, num_ranks, 10)

    mapped = jax.shard_map(
        positions, mesh=mesh_of(sequence=num_ranks), in_specs=(), out_specs=P("sequence")
    )
    np.testing.assert_array_equal(mapped(), row_order(10 * num_ranks, method, num_ranks))
