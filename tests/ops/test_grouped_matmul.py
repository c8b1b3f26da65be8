import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.ops import grouped_matmul as module
from olmo_jax.ops.grouped_matmul import default_backend, grouped_matmul, rest_rows, visits_of

ROWS, WIDTH, OUT = 330, 8, 12
SIZES = {
    "all rows": (70, 1, 130, 64, 65),
    "empty at the start": (0, 100, 20, 80, 100),
    "empty in the middle": (100, 0, 0, 130, 100),
    "empty at the end": (100, 130, 100, 0, 0),
    "all but one empty": (0, 0, 330, 0, 0),
    "rows left over": (3, 0, 90, 0, 61),
    "one row": (0, 0, 0, 1, 0),
    "no row": (0, 0, 0, 0, 0),
}
BACKENDS = ("tiles", "large_tiles", "ragged")


def make_inputs(dtype, num_groups=5):
    generator = np.random.default_rng(0)
    rows = jnp.asarray(generator.standard_normal((ROWS, WIDTH)), dtype)
    weights = jnp.asarray(generator.standard_normal((num_groups, WIDTH, OUT)), dtype)
    gradient = jnp.asarray(generator.standard_normal((ROWS, OUT)), dtype)
    return rows, weights.astype(jnp.float32), gradient


def result_and_gradients(rows, weights, gradient, sizes, backend):
    product = partial(grouped_matmul, group_sizes=sizes, backend=backend)
    result, backward = jax.vjp(product, rows, weights)
    return (result, *backward(gradient))


run = jax.jit(result_and_gradients, static_argnums=4)


def expected(rows, weights, gradient, sizes):
    rows, weights, gradient = (np.asarray(a, np.float64) for a in (rows, weights, gradient))
    result, rows_gradient = np.zeros((ROWS, OUT)), np.zeros((ROWS, WIDTH))
    weights_gradient, start = np.zeros(weights.shape), 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        result[part] = rows[part] @ weights[group]
        rows_gradient[part] = gradient[part] @ weights[group].T
        weights_gradient[group] = rows[part].T @ gradient[part]
        start += size
    return result, rows_gradient, weights_gradient


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_group_meets_its_own_weight_forward_and_backward(backend, dtype):
    inputs = make_inputs(dtype)
    # FP32 sums of at most 330 products; a bf16 result is rounded once, a weight gradient never.
    tolerance = 2e-5 if dtype == jnp.float32 else 2**-8
    for name, sizes in SIZES.items():
        actual = run(*inputs, jnp.asarray(sizes, jnp.int32), backend)
        wanted = expected(*inputs, sizes)
        np.testing.assert_allclose(actual[0], wanted[0], tolerance, 2e-5, err_msg=name)
        np.testing.assert_allclose(actual[1], wanted[1], tolerance, 2e-5, err_msg=name)
        np.testing.assert_allclose(actual[2], wanted[2], 2e-5, 5e-5, err_msg=name)
        assert [a.dtype for a in actual] == [dtype, dtype, jnp.float32]


@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_group_change_nothing(backend, poison):
    rows, weights, gradient = make_inputs(jnp.bfloat16)
    sizes = jnp.asarray(SIZES["rows left over"], jnp.int32)
    used = sum(SIZES["rows left over"])
    clean = run(rows, weights, gradient, sizes, backend)
    poisoned = (rows.at[used:].set(poison), weights, gradient.at[used:].set(poison))
    for before, after in zip(clean, run(*poisoned, sizes, backend), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    assert not np.any(np.asarray(clean[0][used:], np.float32))
    assert not np.any(np.asarray(clean[1][used:], np.float32))


def test_one_program_serves_any_sizes():
    inputs = make_inputs(jnp.float32)
    program = jax.jit(partial(result_and_gradients, backend="tiles"))
    for sizes in SIZES.values():
        program(*inputs, jnp.asarray(sizes, jnp.int32))
    assert program._cache_size() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bf16_weight_gradient_does_not_stand_still(backend):
    # bf16 has 8 bits: a sum of ones kept in bf16 would stop at 256.
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    sizes = jnp.asarray([4095, 1], jnp.int32)
    weights = jnp.ones((2, 1, 1), jnp.float32)
    gradient = run(ones, weights, ones, sizes, backend)[2]
    assert gradient.ravel().tolist() == [4095.0, 1.0]


def test_a_bf16_gradient_of_full_tiles_runs_on_a_cpu():
    # XLA:CPU has no bf16 product of rows by rows: it must get the transposed rows as they are.
    rows = jnp.ones((4096, 128), jnp.bfloat16)
    gradient = jnp.ones((4096, 256), jnp.bfloat16)
    sizes = jnp.asarray([1365, 2048], jnp.int32)
    weights = jnp.ones((2, 128, 256), jnp.float32)
    actual = run(rows, weights, gradient, sizes, "tiles")[2]
    assert np.unique(actual[0]).tolist() == [1365.0]
    assert np.unique(actual[1]).tolist() == [2048.0]


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_visits_own_each_row_once_and_inside_their_window(tile):
    generator = np.random.default_rng(tile)
    for _ in range(20):
        shares = generator.dirichlet(np.full(7, 0.3))
        sizes = generator.multinomial(generator.integers(64, 201), shares)
        owner = np.full(200, -1)
        main, rest = visits_of(jnp.asarray(sizes, jnp.int32), 200, tile)
        for visits, length in ((main, tile), (rest, rest_rows(tile))):
            for group, first, start, stop in zip(*map(np.asarray, visits), strict=True):
                assert 0 <= first <= 200 - length
                assert start == stop or first <= start < stop <= first + length
                assert np.all(owner[start:stop] == -1)
                owner[start:stop] = group
        np.testing.assert_array_equal(owner[: sizes.sum()], np.repeat(np.arange(7), sizes))
        assert np.all(owner[sizes.sum() :] == -1)


def test_shards_and_recomputation_give_the_same_values():
    rows, weights, gradient = make_inputs(jnp.float32)
    sizes = jnp.asarray([SIZES["all rows"], SIZES["rows left over"]], jnp.int32)
    stacked = [jnp.stack([a, 2 * a]) for a in (rows, weights, gradient)]

    def on_shard(rows, weights, gradient, sizes):
        product = jax.checkpoint(partial(grouped_matmul, group_sizes=sizes[0], backend="tiles"))
        result, backward = jax.vjp(product, rows[0], weights[0])
        return [a[None] for a in (result, *backward(gradient[0]))]

    spec = PartitionSpec("expert")
    mesh = Mesh(np.array(jax.devices()[:2]), ("expert",))
    sharded = jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    )(*stacked, sizes)
    for shard in range(2):
        alone = run(*(a[shard] for a in stacked), sizes[shard], "tiles")
        for one, many in zip(alone, sharded, strict=True):
            np.testing.assert_allclose(one, many[shard], 1e-6, 1e-5)


@pytest.mark.parametrize("backend", ["tiles", "large_tiles"])
def test_the_program_does_not_branch_on_the_sizes_and_sums_in_fp32(backend):
    inputs = (*make_inputs(jnp.bfloat16), jnp.asarray(SIZES["all rows"], jnp.int32))
    program = str(jax.make_jaxpr(partial(result_and_gradients, backend=backend))(*inputs))
    assert "scan" in program
    assert not any(name in program for name in ("cond[", "while[", "scatter", "callback"))
    assert re.search(r":f32\[[\d,]*\] = dot_general", program)
    assert not re.search(r":bf16\[[\d,]*\] = dot_general", program)  # no tile's sum is rounded


def test_mosaic_gets_clean_rows_and_gives_the_same_values(monkeypatch):
    # The kernels need a Hopper GPU; JAX's operation stands in for them.
    def ragged_dot(*args, implementation, **options):
        assert implementation == "mosaic"
        return lax.ragged_dot(*args, **options)

    def ragged_dot_general(*args, implementation, **options):
        assert implementation == "mosaic"
        return lax.ragged_dot_general(*args, **options)

    kernels = SimpleNamespace(ragged_dot=ragged_dot, ragged_dot_general=ragged_dot_general)
    monkeypatch.setattr(module, "_tokamax", lambda: kernels)
    rows, weights, gradient = make_inputs(jnp.bfloat16)
    sizes = jnp.asarray(SIZES["rows left over"], jnp.int32)
    rows = rows.at[sum(SIZES["rows left over"]) :].set(jnp.nan)
    wanted = run(rows, weights, gradient, sizes, "ragged")
    actual = run(rows, weights, gradient, sizes, "mosaic")
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), 2**-7, 1e-5
        )


@pytest.mark.parametrize(
    ("platform", "capability", "backend"),
    [
        ("cpu", "0", "tiles"),
        ("tpu", "0", "ragged"),
        ("gpu", "8.0", "large_tiles"),
        ("gpu", "9.0", "mosaic"),
        ("cuda", "10.0", "large_tiles"),
    ],
)
def test_the_backend_follows_the_platform(platform, capability, backend):
    assert default_backend(platform, capability) == backend


def test_an_unknown_backend_is_refused():
    rows, weights, _ = make_inputs(jnp.float32)
    sizes = jnp.asarray(SIZES["no row"], jnp.int32)
    with pytest.raises(ValueError, match="backend='dense' is no grouped matmul; use one of tiles"):
        grouped_matmul(rows, weights, sizes, backend="dense")


def test_mosaic_without_tokamax_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    rows, weights, _ = make_inputs(jnp.float32)
    sizes = jnp.asarray(SIZES["no row"], jnp.int32)
    with pytest.raises(ValueError, match=r"needs the package tokamax.*install olmo_jax\[cuda13\]"):
        grouped_matmul(rows, weights, sizes, backend="mosaic")
