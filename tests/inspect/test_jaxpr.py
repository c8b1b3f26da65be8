"""Small programs whose communication, FLOPs and dtypes are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from olmo_jax.inspect import jaxpr as program

SIZES = {"data": 2, "expert": 4, "sequence": 1}
AXES = tuple(SIZES)
BOTH = ("data", "expert")
SHARDED = P(BOTH)


def traced(function, *args):
    return program.live(jax.make_jaxpr(function)(*args))


def on_mesh(body, in_specs=SHARDED, out_specs=SHARDED):
    """Wrap `body` in a shard_map over eight devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(SIZES.values())), AXES)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    )


def vary(x, axes=BOTH):
    return lax.pcast(x, axes, to="varying")


def found(body, *args, **specs):
    return program.collectives(traced(on_mesh(body, **specs), *args), SIZES)


ROWS = jnp.ones((64, 16), jnp.bfloat16)  # a device has [8, 16]: 256 bytes


@pytest.mark.parametrize(
    ("body", "kind", "axes", "operand_bytes", "ring_bytes"),
    [
        (lambda x: vary(lax.psum(x, "data"), ("data",)), "reduce", ("data",), 256, 256),
        (lambda x: vary(lax.psum(x, BOTH)), "reduce", BOTH, 256, 448),
        (lambda x: vary(lax.pmax(x, "expert"), ("expert",)), "max", ("expert",), 256, 384),
        (lambda x: vary(lax.pmin(x, "expert"), ("expert",)), "min", ("expert",), 256, 384),
        (
            lambda x: lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True),
            "reduce_scatter",
            ("expert",),
            256,
            192,
        ),
        (lambda x: lax.all_gather(x, "expert", tiled=True), "all_gather", ("expert",), 256, 768),
        (
            lambda x: vary(lax.all_gather(x, BOTH, tiled=True, to="invarying")),
            "all_gather",
            BOTH,
            256,
            1792,
        ),
        (
            lambda x: lax.all_to_all(x, "expert", 0, 0, tiled=True),
            "all_to_all",
            ("expert",),
            256,
            192,
        ),
        (
            lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
            "permute",
            ("data",),
            256,
            256,
        ),
    ],
)
def test_each_collective_is_named_and_weighed(body, kind, axes, operand_bytes, ring_bytes):
    (collective,) = found(body, ROWS)
    assert (collective.kind, collective.axes) == (kind, axes)
    assert (collective.dtype, collective.shape) == ("bfloat16", (8, 16))
    assert collective.operand_bytes == operand_bytes
    assert collective.count == 1
    assert program.ring_bytes(collective, SIZES) == ring_bytes


def test_counts_are_multiplied_by_the_scans_around_them():
    def body(x):
        def layer(x, _):
            return vary(lax.psum(x, "expert"), ("expert",)), None

        def microbatch(total, x):
            y, _ = lax.scan(jax.checkpoint(layer), x, None, length=3)
            return total + y, lax.psum(y.sum(), BOTH)

        with jax.named_scope("microbatches"):
            total, sums = lax.scan(microbatch, jnp.zeros_like(x[0]), x)
        return vary(lax.psum(total, "data"), ("data",)), sums

    collectives = found(
        body,
        jnp.ones((5, 64, 16)),
        in_specs=P(None, BOTH),
        out_specs=(P(BOTH), P()),
    )
    counts = {(c.axes, c.shape): (c.count, [loop.length for loop in c.loops]) for c in collectives}
    assert counts == {
        (("expert",), (8, 16)): (15, [5, 3]),
        (BOTH, ()): (5, [5]),
        (("data",), (8, 16)): (1, []),
    }
    within = [program.inside(c.loops, scope="microbatches") for c in collectives]
    assert within == [True, True, False]
    assert [program.inside(c.loops, length=3) for c in collectives] == [True, False, False]
    # 15 * 2 * 512 * 3/4 and 5 * 2 * 4 * 7/8 and 512
    assert program.sent_bytes(collectives, SIZES) == 15 * 768 + 5 * 7 + 512


def test_equal_collectives_at_one_place_are_one_entry_with_their_number():
    def body(x):
        return lax.ppermute(lax.ppermute(x, "data", [(0, 1), (1, 0)]), "data", [(0, 1), (1, 0)])

    (collective,) = found(body, ROWS)
    assert collective.count == 2


def test_an_axis_of_one_device_sends_nothing():
    def alone(x):
        return vary(lax.psum(vary(x, ("sequence",)), "sequence"), ("sequence",))

    specs = {"in_specs": P(BOTH), "out_specs": P((*BOTH, "sequence"))}
    assert found(alone, ROWS, **specs) == []
    (collective,) = found(lambda x: lax.psum(vary(x, ("sequence",)), AXES), ROWS, out_specs=P())
    assert collective.axes == BOTH


def test_an_unknown_primitive_over_mesh_axes_is_refused(monkeypatch):
    monkeypatch.delitem(program.KINDS, "ppermute")
    with pytest.raises(ValueError, match=r"ppermute over mesh axes \('data',\).*add it to"):
        found(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), ROWS)


@jax.custom_vjp
def halved_gather(x):
    return lax.all_gather(x.astype(jnp.bfloat16), "expert", tiled=True)


halved_gather.defvjp(
    lambda x: (halved_gather(x), None),
    lambda _, g: (
        lax.psum_scatter(g.astype(jnp.float32), "expert", scatter_dimension=0, tiled=True),
    ),
)


def test_a_gradient_counts_forward_backward_and_recompute():
    """Remat runs the gather again; the backward rule of a custom derivative is seen."""

    def layer(x, _):
        return jnp.sin(halved_gather(x).astype(jnp.float32))[:8] * x, None

    def body(x):
        def loss(x):
            return lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

        return jax.grad(loss)(x)

    totals = {}
    for c in found(body, jnp.ones((64, 16))):
        key = (c.kind, c.dtype)
        totals[key] = totals.get(key, 0) + c.count
    assert totals == {("all_gather", "bfloat16"): 6, ("reduce_scatter", "float32"): 3}


def test_custom_derivatives_are_entered_without_a_gradient():
    (collective,) = found(lambda x: halved_gather(x)[:8], jnp.ones((64, 16)))
    assert collective.kind == "all_gather"


def test_results_that_nobody_reads_do_not_count():
    def body(x):
        def step(x, _):
            return x + 1, lax.all_gather(x, "expert")

        return lax.scan(step, x, None, length=2)[0]

    jaxpr = jax.make_jaxpr(on_mesh(body))(ROWS)
    assert len(program.collectives(jaxpr, SIZES)) == 1
    assert program.collectives(program.live(jaxpr), SIZES) == []


def test_flops_of_a_scan_of_products():
    def step(x, w):
        return jnp.tanh(x @ w), None

    x, w = jnp.ones((8, 16)), jnp.ones((5, 16, 16))
    forward = traced(lambda x, w: lax.scan(step, x, w)[0], x, w)
    assert program.matmul_flops(forward) == 5 * 2 * 8 * 16 * 16

    def loss(x, w, body):
        return lax.scan(body, x, w)[0].sum()

    kept = traced(jax.grad(lambda x, w: loss(x, w, step), (0, 1)), x, w)
    assert program.matmul_flops(kept) == 3 * 5 * 2 * 8 * 16 * 16
    again = traced(jax.grad(lambda x, w: loss(x, w, jax.checkpoint(step)), (0, 1)), x, w)
    assert program.matmul_flops(again) == 4 * 5 * 2 * 8 * 16 * 16


def test_flops_of_batched_ragged_and_convolution_products():
    a, b = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    batched = traced(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), a, b)
    assert program.matmul_flops(batched) == 2 * 3 * 4 * 5 * 6

    rows, weights, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 5])
    forward = traced(lax.ragged_dot, rows, weights, sizes)
    assert program.matmul_flops(forward) == 2 * 8 * 4 * 3

    def loss(rows, weights):
        return lax.ragged_dot(rows, weights, sizes).sum()

    backward = traced(jax.grad(loss, (0, 1)), rows, weights)
    assert program.matmul_flops(backward) == 2 * (2 * 8 * 4 * 3)

    images, kernel = jnp.ones((2, 3, 10)), jnp.ones((7, 3, 4))
    convolved = traced(lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID"), images, kernel)
    assert program.matmul_flops(convolved) == 2 * (2 * 7 * 7) * (3 * 4)


def test_flops_in_a_loop_without_trip_count_are_refused():
    def body(x, w):
        return lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ w, x)

    with pytest.raises(ValueError, match=r"without a known trip count.*lax\.scan"):
        program.matmul_flops(traced(body, jnp.ones((4, 4)), jnp.ones((4, 4))))


def test_only_loops_without_trip_count_are_reported():
    def body(x, n):
        x = lax.fori_loop(0, 4, lambda _, x: x * 2, x)
        x = lax.scan(lambda x, _: (x + 1, None), x, None, length=3)[0]
        return lax.fori_loop(0, n, lambda _, x: x * 3, x)

    (loop,) = program.unbounded_loops(traced(jax.jit(body), 1.0, 5))
    assert loop.name == "while"


def test_conditionals_and_callbacks_are_found_in_nested_bodies():
    def body(x):
        def step(x, _):
            jax.debug.print("{}", x[0])
            return lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, x), None

        return lax.scan(jax.checkpoint(step), x, None, length=2)[0]

    jaxpr = traced(body, jnp.ones(3))
    assert [site.times for site in program.conditionals(jaxpr)] == [2]
    assert len(program.callbacks(jaxpr)) == 1

    def pure(x):
        return jnp.where(x > 0, x + 1, x * 2)

    assert program.conditionals(traced(pure, jnp.ones(3))) == []
    assert program.callbacks(traced(pure, jnp.ones(3))) == []
    answer = jax.ShapeDtypeStruct((3,), jnp.float32)
    calls = traced(lambda x: jax.pure_callback(np.sin, answer, x), jnp.ones(3))
    assert len(program.callbacks(calls)) == 1


INDICES = jnp.array([0, 2, 2])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x, i: x.at[i].add(1.0), 1),
        (lambda x, i: jax.ops.segment_sum(x, i, num_segments=3), 1),
        (lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x), 1),
        (lambda x, i: x.at[i].multiply(2.0), 1),
        (lambda x, i: x.at[i].add(1.0, unique_indices=True), 0),
        (lambda x, i: x.astype(jnp.int32).at[i].add(1), 0),
        (lambda x, i: x.at[i].set(1.0, unique_indices=True), 0),
        (lambda x, i: x.at[i[0]].add(1.0), 0),
        (lambda x, i: x[i], 0),
    ],
)
def test_float_scatters_whose_indices_may_repeat_are_found(body, expected):
    assert len(program.scatter_adds(traced(body, jnp.ones(3), INDICES))) == expected


def test_dtypes_of_carries_outputs_and_weight_gradients():
    """A bf16 weight gradient is told from an FP32 one by the shape that its dot yields."""
    x, w = jnp.ones((4, 6, 3), jnp.bfloat16), jnp.ones((3, 5), jnp.bfloat16)

    def plain(w, x):
        return (x @ w).astype(jnp.float32).sum()

    def total(w, x):
        def step(total, x):
            grad = jax.grad(plain)(w, x)
            return total + grad.astype(jnp.float32), grad.sum()

        return lax.scan(step, jnp.zeros((3, 5)), x)

    jaxpr = traced(total, w, x)
    products = program.matmuls(jaxpr)
    (gradient,) = program.with_shapes(products, [(5, 1, 3)])
    assert program.with_shapes(products, [(3, 5)]) == [gradient]
    assert program.with_shapes(products, [(3, 6)]) == []
    assert (gradient.dtype, gradient.times) == ("bfloat16", 4)
    values = program.scan_values(jaxpr)
    assert [(v.source, v.dtype, v.shape) for v in values] == [
        ("carry", "float32", (3, 5)),
        ("output", "bfloat16", (4,)),
    ]
    (sums,) = program.outputs(jaxpr, "reduce_sum")
    assert (sums.dtype, sums.shape) == ("float32", ())  # jnp.sum widens, then rounds


def test_dtypes_under_a_scope():
    def body(x):
        with jax.named_scope("router"):
            y = x.astype(jnp.float32) @ jnp.ones((3, 2))
        with jax.named_scope("experts"):
            return y.astype(jnp.bfloat16) * 2

    jaxpr = traced(body, jnp.ones((4, 3), jnp.bfloat16))
    assert program.float_dtypes(jaxpr, "router") == {"float32"}
    assert "bfloat16" in program.float_dtypes(jaxpr, "experts")
    assert program.float_dtypes(jaxpr, "head") == set()


def test_only_sums_of_floats_over_ranks_must_be_fp32():
    def body(x):
        counts = lax.psum((x > 0).astype(jnp.int32).sum(), BOTH)
        largest = lax.pmax(x.sum(), BOTH)
        shard = lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        return counts, largest, lax.psum(shard.astype(jnp.float32), "expert")

    jaxpr = traced(on_mesh(body, out_specs=(P(), P(), P("data"))), ROWS)
    reductions = program.float_reductions(jaxpr, SIZES)
    assert [(c.kind, c.dtype) for c in reductions] == [
        ("reduce_scatter", "bfloat16"),
        ("reduce", "float32"),
    ]
