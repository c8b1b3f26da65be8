"""Time and temporary memory of the attention backends, beside the dense reference.

python tools/bench_attention.py --length 2048 --dtype bfloat16 --backends dense blockwise
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_jax.arch import sizes
from olmo_jax.ops.attention import attention


@dataclass(frozen=True)
class Measurement:
    """Times of one compiled program, in the order in which they were taken."""

    times_s: tuple[float, ...]
    temporary_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, _, high = statistics.quantiles(self.times_s, n=4)
        return (high - low) / self.median_s


def temporary_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def measure(
    programs: Sequence[Callable[..., object]], arguments: Sequence[jax.Array], repeats: int
) -> list[Measurement]:
    """Compile each program, then run them in turn, so that a busy machine slows all alike."""
    compiled = [jax.jit(program).lower(*arguments).compile() for program in programs]
    times: list[list[float]] = [[] for _ in compiled]
    for _ in range(repeats + 1):
        for program, taken in zip(compiled, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            taken.append(time.perf_counter() - start)
    return [
        Measurement(tuple(taken[1:]), temporary_bytes(program))
        for taken, program in zip(times, compiled, strict=True)
    ]


def make_inputs(options: argparse.Namespace) -> tuple[jax.Array, ...]:
    """Return q, k, v, the cotangent, and ids of documents of `--document` positions."""
    rng = np.random.default_rng(0)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shape = (options.sequences, options.length)
    arrays = [rng.normal(size=(*shape, num_heads, options.head_dim)) for num_heads in heads]
    starts = np.arange(options.length) % options.document == 0 if options.document else 0
    segment_ids = np.broadcast_to(np.cumsum(starts + np.zeros(options.length)), shape)
    return *(jnp.asarray(x, options.dtype) for x in arrays), jnp.asarray(segment_ids, jnp.int32)


def forward(options: argparse.Namespace, backend: str, *inputs: jax.Array) -> jax.Array:
    q, k, v, _, segment_ids = inputs
    return attention(
        q,
        k,
        v,
        segment_ids=segment_ids if options.document else None,
        window=options.window,
        scale=options.head_dim**-0.5,
        backend=backend,
    )


def both(options: argparse.Namespace, backend: str, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, d_out, segment_ids = inputs
    out, pull = jax.vjp(lambda *qkv: forward(options, backend, *qkv, d_out, segment_ids), q, k, v)
    return out, *pull(d_out)


def print_table(title: str, names: Sequence[str], measured: Sequence[Measurement]) -> None:
    table = Table(
        "backend", "median ms", "spread", "time ratio", "temp MiB", "temp ratio", title=title
    )
    first = measured[0]
    for name, one in zip(names, measured, strict=True):
        table.add_row(
            name,
            f"{one.median_s * 1e3:.1f}",
            f"{one.spread:.0%}",
            f"{one.median_s / first.median_s:.2f}",
            f"{one.temporary_bytes / 2**20:.1f}",
            f"{one.temporary_bytes / max(first.temporary_bytes, 1):.3f}",
        )
    Console().print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--document", type=int, default=700, help="positions a document; 0: no segment ids"
    )
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=["dense", "blockwise"])
    parser.add_argument(
        "--block", type=int, default=sizes.BLOCK, help="positions in a block at most"
    )
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


def main() -> None:
    options = parse()
    sizes.BLOCK = options.block
    inputs = make_inputs(options)
    for title, program in (("forward", forward), ("forward and backward", both)):
        programs = [partial(program, options, backend) for backend in options.backends]
        shown = f"{title}: {options.dtype}, length {options.length}, block {sizes.BLOCK}"
        print_table(shown, options.backends, measure(programs, inputs, options.repeats))


if __name__ == "__main__":
    main()
