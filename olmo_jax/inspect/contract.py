"""All that can be asserted of a step, from one trace and one compilation."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olmo_jax.inspect import hlo
from olmo_jax.inspect import jaxpr as jaxprs
from olmo_jax.inspect.jaxpr import Loop, inside
from olmo_jax.train.accumulate import MICROBATCHES


@dataclass(frozen=True, order=True)
class Total:
    """All communication of one sort in a step: times, and bytes that one rank sends (by a ring)."""

    in_loop: bool
    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int
    sent_bytes: float


@dataclass(frozen=True)
class Contract:
    """What one optimizer step does, per device: `traced` from the jaxpr, `compiled` from XLA.

    Units: bytes of `donated` and `memory` are one device's; `matmul_flops` one device's step.
    """

    axis_sizes: dict[str, int]
    traced: list[jaxprs.Collective]
    compiled: list[hlo.Collective]
    loops: list[Loop]
    conditionals: int
    callbacks: int
    scatter_adds: int
    matmul_flops: int
    donated: dict[int, int]
    memory: dict[str, int]

    @property
    def totals(self) -> list[Total]:
        """Return what is communicated, in and outside of the loop over microbatches."""
        return sorted(_totals(self.traced, self.axis_sizes))

    def compiled_kinds(self, *, in_loop: bool) -> dict[str, int]:
        """Return the places of each kind in the compiled program; a loop of one turn is gone."""
        return hlo.kinds(c for c in self.compiled if inside(c.loops, scope=MICROBATCHES) == in_loop)


def _totals(found: list[jaxprs.Collective], axis_sizes: Mapping[str, int]) -> Iterator[Total]:
    counts: Counter[tuple[Any, ...]] = Counter()
    sent: dict[tuple[Any, ...], float] = defaultdict(float)
    for c in found:
        key = (inside(c.loops, scope=MICROBATCHES), c.kind, c.axes, c.dtype)
        counts[key] += c.count
        sent[key] += c.count * jaxprs.ring_bytes(c, axis_sizes)
    for key, count in counts.items():
        yield Total(*key, count=count, sent_bytes=sent[key])


def measure(traced: Any, axis_sizes: Mapping[str, int]) -> Contract:
    """Compile `traced` (`jitted.trace(*arguments)`, a `jax.stages.Traced`) and read both programs.

    Conditionals and callbacks are the larger of both counts: XLA merges some, and adds some.
    """
    # Autodiff leaves residuals that nobody reads; XLA drops them, and so must the count.
    jaxpr = jaxprs.live(traced.jaxpr)
    compiled = traced.lower().compile()
    module = hlo.parse(compiled.as_text())
    return Contract(
        axis_sizes=dict(axis_sizes),
        traced=jaxprs.collectives(jaxpr, axis_sizes),
        compiled=hlo.collectives(module),
        loops=hlo.loops(module),
        conditionals=max(len(jaxprs.conditionals(jaxpr)), len(hlo.conditionals(module))),
        callbacks=max(len(jaxprs.callbacks(jaxpr)), len(hlo.callbacks(module))),
        scatter_adds=len(jaxprs.scatter_adds(jaxpr)),
        matmul_flops=jaxprs.matmul_flops(jaxpr),
        donated=hlo.donated(module),
        memory=memory_bytes(compiled),
    )


def memory_bytes(compiled: Any) -> dict[str, int]:
    """Return one device's argument, output, aliased and temporary bytes of a compiled step."""
    analysis = compiled.memory_analysis()
    return {
        name: getattr(analysis, f"{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp")
    }
