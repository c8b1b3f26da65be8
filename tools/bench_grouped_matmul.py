"""Time the grouped matmul and its gradients against one dense product of the same FLOPs.

All programs of a table take turns, so that a busy machine slows them alike. A ratio is the median
over turns of time / dense time in the same turn; `cpu` is the same of the process's CPU time, which
other programs on the machine disturb less.

    python tools/bench_grouped_matmul.py --experts 8 32 --dtypes float32 bfloat16
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from olmo_jax.ops.grouped_matmul import grouped_matmul

Program = Callable[[], Array]


def main() -> None:
    """Print one table per dtype and number of experts."""
    args = _arguments()
    for dtype in args.dtypes:
        for num_experts in args.experts:
            programs = _programs(args, jnp.dtype(dtype), num_experts)
            print(f"\n{dtype}, {num_experts} experts, {args.rows} rows, {args.width} x {args.out}")
            _print_table(programs, _time_in_turns(programs, args.turns))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=int, default=512)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=["tiles"])
    parser.add_argument("--turns", type=int, default=25)
    return parser.parse_args()


def _programs(
    args: argparse.Namespace, dtype: np.dtype, num_experts: int
) -> dict[tuple[str, str], Program]:
    generator = np.random.default_rng(0)
    rows = jnp.asarray(generator.standard_normal((args.rows, args.width)), dtype)
    gradient = jnp.asarray(generator.standard_normal((args.rows, args.out)), dtype)
    shape = (num_experts, args.width, args.out)
    weights = jnp.asarray(generator.standard_normal(shape), jnp.float32)
    shares = generator.dirichlet(np.full(num_experts, 8.0))
    sizes = jnp.asarray(generator.multinomial(args.rows, shares), jnp.int32)

    products = {"dense": _dense}
    for backend in args.backends:
        products[backend] = partial(grouped_matmul, group_sizes=sizes, backend=backend)
    programs: dict[tuple[str, str], Program] = {}
    for part, function in _PARTS.items():
        for name, product in products.items():
            compiled = jax.jit(partial(function, product)).lower(rows, weights, gradient).compile()
            programs[part, name] = partial(compiled, rows, weights, gradient)
    return programs


def _dense(rows: Array, weights: Array) -> Array:
    return _dense_product(rows, weights[0])


@jax.custom_vjp
def _dense_product(rows: Array, weight: Array) -> Array:
    return _contract(rows, weight.astype(rows.dtype), 1, 0).astype(rows.dtype)


def _dense_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    rows, weight = saved
    rows_gradient = _contract(gradient, weight.astype(rows.dtype), 1, 1).astype(rows.dtype)
    return rows_gradient, _contract(rows, gradient, 0, 0)


def _contract(left: Array, right: Array, left_dim: int, right_dim: int) -> Array:
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


_dense_product.defvjp(
    lambda rows, weight: (_dense_product(rows, weight), (rows, weight)), _dense_backward
)


def _forward(product: Callable, rows: Array, weights: Array, gradient: Array) -> Array:
    return product(rows, weights)


def _rows_gradient(product: Callable, rows: Array, weights: Array, gradient: Array) -> Array:
    return jax.vjp(lambda rows: product(rows, weights), rows)[1](gradient)[0]


def _weights_gradient(product: Callable, rows: Array, weights: Array, gradient: Array) -> Array:
    if product is _dense:  # the gradient of one weight, not of the slice that took it
        return jax.vjp(lambda weight: _dense_product(rows, weight), weights[0])[1](gradient)[0]
    return jax.vjp(lambda weights: product(rows, weights), weights)[1](gradient)[0]


_PARTS = {
    "forward": _forward,
    "rows gradient": _rows_gradient,
    "weights gradient": _weights_gradient,
}


def _time_in_turns(
    programs: dict[tuple[str, str], Program], turns: int
) -> dict[tuple[str, str], np.ndarray]:
    """Return wall and CPU milliseconds [turns, 2] of each program, after one warm-up turn."""
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in programs}
    for _ in range(turns + 1):
        for key, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            program().block_until_ready()
            times[key].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {key: 1e3 * np.array(each[1:]) for key, each in times.items()}


def _print_table(
    programs: dict[tuple[str, str], Program], times: dict[tuple[str, str], np.ndarray]
) -> None:
    print(
        f"{'part':18}{'backend':13}{'median ms':>10}{'min':>8}{'spread':>9}{'ratio':>7}{'cpu':>7}"
    )
    for part, name in programs:
        wall, cpu = np.median(times[part, name], axis=0), times[part, name][:, 1]
        low, high = np.quantile(times[part, name][:, 0], [0.1, 0.9])
        ratio = np.median(times[part, name][:, 0] / times[part, "dense"][:, 0])
        cpu_ratio = np.median(cpu) / np.median(times[part, "dense"][:, 1])
        spread = (high - low) / wall[0]
        print(
            f"{part:18}{name:13}{wall[0]:10.2f}{times[part, name][:, 0].min():8.2f}"
            f"{spread:8.0%} {ratio:7.2f}{cpu_ratio:7.2f}"
        )


if __name__ == "__main__":
    main()
