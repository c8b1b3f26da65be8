"""Matrix products of row groups with one weight each: rows sorted by expert, one call."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from olmo_jax.arch.sizes import CPU_TILE, num_visits, rest_rows, tile_rows
from olmo_jax.ops import target, varying

# CUDA compute capabilities
_HOPPER = 9.0
_BLACKWELL = 10.0


class Kernels(NamedTuple):
    """The forward-only products of one backend.

    Both take rows sorted by group. Rows past the last group may hold anything; `product` leaves
    zeros there and `outer` adds nothing of them.
    """

    product: Callable[[Array, Array, Array, bool], Array]
    outer: Callable[[Array, Array, Array], Array]


def grouped_matmul(
    rows: Float[Array, "R in"],
    weights: Float32[Array, "E in out"],
    group_sizes: Int32[Array, " E"],
    *,
    backend: str | None = None,
) -> Float[Array, "R out"]:
    """Multiply the rows of group e, sorted by group, by weight e, in the dtype of `rows`.

    The weight gradient is FP32 from its first addend. Rows past the last group are ignored, NaN
    and all: their result and their gradient are zero.

    Raises: ValueError for an unknown backend, or one whose package is not installed.
    """
    name = default_backend(*target.here()) if backend is None else backend
    if name not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ValueError(f"backend={name!r} is no grouped matmul; use one of {known}")
    return _grouped(rows, weights, group_sizes, name)


def default_backend(platform: str, compute_capability: str = "0") -> str:
    """Return the backend for a device's platform and, if that is CUDA, compute capability.

    `lax.ragged_dot` does E times the work on CPU and GPU, so only TPUs use it. tokamax's kernel for
    Blackwell does not trace under `check_vma` (0.0.17: "mpmd_map does not support Refs with
    varying manual axis types").
    """
    if platform in ("gpu", "cuda"):
        is_hopper = _HOPPER <= float(compute_capability) < _BLACKWELL
        return "mosaic" if is_hopper else "large_tiles"
    return "ragged" if platform == "tpu" else "tiles"


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(rows: Array, weights: Array, group_sizes: Array, backend: str) -> Array:
    return _grouped_forward(rows, weights, group_sizes, backend)[0]


def _grouped_forward(rows: Array, weights: Array, group_sizes: Array, backend: str):
    weights = weights.astype(rows.dtype)
    result = _BACKENDS[backend].product(rows, weights, group_sizes, False)
    return result, (rows, weights, group_sizes)


def _grouped_backward(backend: str, saved: tuple[Array, Array, Array], gradient: Array):
    rows, weights, group_sizes = saved
    kernels = _BACKENDS[backend]
    rows_gradient = kernels.product(gradient, weights, group_sizes, True)
    return rows_gradient, kernels.outer(rows, gradient, group_sizes), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


# Tiles: scans over (row tile, group) pairs, as many as there can be.


class Tiling(NamedTuple):
    """The fewest and the most rows of a tile; whether bf16 rows are transposed for `outer`."""

    fewest: int
    most: int
    transpose_bf16: bool


class Visits(NamedTuple):
    """Per visit: its group, the first row of its window, and the rows [start, stop) it owns."""

    group: Int32[Array, " visits"]
    first_row: Int32[Array, " visits"]
    start: Int32[Array, " visits"]
    stop: Int32[Array, " visits"]


def visits_of(group_sizes: Int32[Array, " E"], num_rows: int, tile: int) -> tuple[Visits, Visits]:
    """List the (tile, group) pairs that share a row: the largest of each tile, then the others.

    However the rows are spread there are E - 1 others at most, and each has `rest_rows(tile)` rows
    at most, the length of its window. Visits that are not needed own no row. The last window ends
    with the rows.

    Source: the visits of megablox (JAX), `make_group_metadata`.
    Differs: there all windows are whole tiles, which does up to E - 1 half tiles more.
    """
    # Tiles of 4 rows, groups a, b, c of 3, 2 and 3 rows:
    #
    #     row      0 1 2 3 | 4 5 6 7
    #     group    a a a b | b c c c
    #     main     a a a .   . c c c     one visit a tile: its group with the most rows there
    #     rest           b   b           the others
    #
    # A pair (tile, group) begins where a tile begins or where a group does, so there are at most
    # num_tiles + E - 1 pairs, and E - 1 are left beside one for each tile. Two groups cannot both
    # have more than half of a tile, so the window of a rest is half a tile.
    num_groups = group_sizes.shape[0]
    num_tiles, num_rests = num_visits(num_rows, num_groups, tile)
    stops = jnp.cumsum(group_sizes, dtype=jnp.int32)
    tile_starts = tile * jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
    starts = jnp.maximum(stops - group_sizes, tile_starts)
    counts = jnp.maximum(jnp.minimum(stops, tile_starts + tile) - starts, 0)

    largest = jnp.argmax(counts, axis=1).astype(jnp.int32)
    is_largest = largest[:, None] == jnp.arange(num_groups)
    start = jnp.sum(jnp.where(is_largest, starts, 0), axis=1)
    window = jnp.minimum(tile_starts[:, 0], num_rows - tile)
    main = Visits(largest, window, start, start + jnp.max(counts, axis=1))

    # Pairs that share a row come first, in order; the visits that are left own no row.
    counts = jnp.where(is_largest, 0, counts).reshape(-1)
    pair = jnp.argsort(counts == 0, stable=True)[:num_rests]
    start = starts.reshape(-1)[pair]
    window = jnp.minimum(start, num_rows - rest_rows(tile))
    rest = Visits((pair % num_groups).astype(jnp.int32), window, start, start + counts[pair])
    return main, rest


def _tiles_product(
    tiling: Tiling, rows: Array, weights: Array, group_sizes: Array, transposed: bool
) -> Array:
    num_rows = rows.shape[0]
    tile = tile_rows(num_rows, group_sizes.shape[0], tiling.fewest, tiling.most)
    rows = jnp.pad(rows, ((0, -num_rows % tile), (0, 0)))
    main, rest = visits_of(group_sizes, rows.shape[0], tile)
    contract = _contract(1, 1 if transposed else 0)
    rows_bits, weights_bits = _as_bits(rows), _as_bits(weights)

    def multiply(visit: Visits, length: int) -> Array:
        window = _as_float(lax.dynamic_slice_in_dim(rows_bits, visit.first_row, length), rows)
        weight = _as_float(lax.dynamic_index_in_dim(weights_bits, visit.group, 0, False), rows)
        return _as_bits(contract(window, weight).astype(rows.dtype))

    def visit_tile(_: None, visit: Visits) -> tuple[None, Array]:
        return None, jnp.where(_owned(visit, tile), multiply(visit, tile), 0)

    def visit_rest(result: Array, visit: Visits) -> tuple[Array, None]:
        length = rest_rows(tile)
        before = lax.dynamic_slice_in_dim(result, visit.first_row, length)
        product = jnp.where(_owned(visit, length), multiply(visit, length), before)
        return lax.dynamic_update_slice_in_dim(result, product, visit.first_row, 0), None

    # Main visits cover all rows, one tile each, so their results are stacked and not written into
    # an array: no copy. Rests then overwrite the rows that they own, where main left zeros.
    result = lax.scan(visit_tile, None, main)[1].reshape(rows.shape[0], -1)
    return _as_float(lax.scan(visit_rest, result, rest)[0], rows)[:num_rows]


def _tiles_outer(tiling: Tiling, rows: Array, gradient: Array, group_sizes: Array) -> Array:
    num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
    tile = tile_rows(num_rows, num_groups, tiling.fewest, tiling.most)
    main, rest = visits_of(group_sizes, num_rows, tile)
    transpose = tiling.transpose_bf16 and rows.dtype == jnp.bfloat16
    row_dim = 1 if transpose else 0
    contract = _contract(row_dim, 0)
    # XLA:CPU would fold the transpose into the product, and has no bf16 product of that form.
    turned = lax.optimization_barrier(rows.T) if transpose else rows
    rows_bits, gradient_bits = _as_bits(turned), _as_bits(gradient)

    def visit_window(length: int, total: Array, visit: Visits) -> tuple[Array, None]:
        owned = _owned(visit, length)
        left = lax.dynamic_slice_in_dim(rows_bits, visit.first_row, length, row_dim)
        right = lax.dynamic_slice_in_dim(gradient_bits, visit.first_row, length)
        # Both sides are masked: 0 * NaN of a row past the last group would be NaN.
        product = contract(
            _as_float(jnp.where(owned.T if transpose else owned, left, 0), rows),
            _as_float(jnp.where(owned, right, 0), gradient),
        )
        # A slice of one group, added before it is reshaped, lets XLA:CPU add in place.
        product = lax.dynamic_slice_in_dim(total, visit.group, 1) + product[None]
        return lax.dynamic_update_slice_in_dim(total, product, visit.group, 0), None

    total = jnp.zeros((num_groups, rows.shape[1], gradient.shape[1]), jnp.float32)
    total = lax.scan(partial(visit_window, tile), varying.like(total, rows), main)[0]
    return lax.scan(partial(visit_window, rest_rows(tile)), total, rest)[0]


def _owned(visit: Visits, length: int) -> Array:
    row = visit.first_row + lax.iota(jnp.int32, length)
    return ((row >= visit.start) & (row < visit.stop))[:, None]


def _contract(left: int, right: int) -> Callable[[Array, Array], Array]:
    return partial(
        lax.dot_general,
        dimension_numbers=(((left,), (right,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _as_bits(value: Array) -> Array:
    """View bf16 as integers: XLA:CPU updates a slice of bf16 by converting the whole array."""
    if value.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(value, jnp.uint16)
    return value


def _as_float(value: Array, reference: Array) -> Array:
    if value.dtype == jnp.uint16:
        return lax.bitcast_convert_type(value, reference.dtype)
    return value


# Ragged: JAX's own operation; the reference of the tests.

_OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _ragged_product(rows: Array, weights: Array, group_sizes: Array, transposed: bool) -> Array:
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)
    rows = _without_rest(rows, group_sizes)
    result = lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)
    return _without_rest(result.astype(rows.dtype), group_sizes)


def _ragged_outer(rows: Array, gradient: Array, group_sizes: Array) -> Array:
    return lax.ragged_dot_general(
        _without_rest(rows, group_sizes),
        _without_rest(gradient, group_sizes),
        group_sizes,
        _OUTER,
        preferred_element_type=jnp.float32,
    )


def _without_rest(rows: Array, group_sizes: Array) -> Array:
    row = lax.iota(jnp.int32, rows.shape[0])
    return jnp.where((row < jnp.sum(group_sizes))[:, None], rows, 0)


# Mosaic: tokamax's kernels, forward only; its own gradients do not trace under `check_vma`.
# Source: tokamax 0.0.17, pallas_mosaic_gpu.py. Its outer product is for Hopper alone.


def _mosaic_product(rows: Array, weights: Array, group_sizes: Array, transposed: bool) -> Array:
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)
    rows = _without_rest(rows, group_sizes)
    result = _tokamax().ragged_dot(
        rows, weights, group_sizes, preferred_element_type=rows.dtype, implementation="mosaic"
    )
    return _without_rest(result, group_sizes)


def _mosaic_outer(rows: Array, gradient: Array, group_sizes: Array) -> Array:
    result = _tokamax().ragged_dot_general(
        _without_rest(rows, group_sizes),
        _without_rest(gradient, group_sizes),
        group_sizes,
        _OUTER,
        preferred_element_type=jnp.float32,
        implementation="mosaic",
    )
    # The kernel's result does not say over which axes it varies.
    return varying.like(result, rows)


def _tokamax() -> ModuleType:
    if importlib.util.find_spec("tokamax") is None:
        raise ValueError(
            "backend='mosaic' needs the package tokamax, which is not installed; install "
            "olmo_jax[cuda13] on Python >= 3.12, or use backend='large_tiles'"
        )
    return importlib.import_module("tokamax")


def _tiles(tiling: Tiling) -> Kernels:
    return Kernels(partial(_tiles_product, tiling), partial(_tiles_outer, tiling))


# A GPU wants a product large enough to fill it.
_LARGE = Tiling(128, 1024, transpose_bf16=False)

_BACKENDS = {
    # XLA:CPU has a bf16 product only for a left side whose rows are the result's: else it
    # converts to FP32.
    "tiles": _tiles(Tiling(*CPU_TILE, transpose_bf16=True)),
    "large_tiles": _tiles(_LARGE),
    "mosaic": Kernels(_mosaic_product, _mosaic_outer),
    "ragged": Kernels(_ragged_product, _ragged_outer),
}
