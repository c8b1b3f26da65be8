"""What the executor sets up before the first tick: traced parts, tables, buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from olmo_jax.ops.varying import vary_everywhere
from olmo_jax.parallel.pipeline import segments
from olmo_jax.parallel.pipeline.deferred_backward import (
    DeferredVjp,
    Known,
    deferred_vjp,
    forward_only_vjp,
)
from olmo_jax.parallel.pipeline.parts import Parts, Tree, blank, pick, zeros
from olmo_jax.parallel.pipeline.schedule import Schedule
from olmo_jax.parallel.pipeline.transfers import PIPELINE


@dataclass(frozen=True)
class Setup:
    """All that stays the same from tick to tick.

    `labels` are divided by rank, with ignored rows at the end. The body's accumulators are those of
    one chunk.
    """

    schedule: Schedule
    segments: segments.Segments
    forward: Int32[np.ndarray, "ticks ranks 4"]
    backward: Int32[np.ndarray, "ticks ranks 4"]
    num_slots: int
    parts: Parts
    accumulators: Parts
    data: Tree
    labels: Int32[Array, "M P t"]
    rank: Int32[Array, ""]

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        """Return the shape of what goes from stage to stage."""
        return self.parts.first.shapes.output

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """Return the shape of one rank's rows in the last part."""
        return rows_of(self.x, self.labels)

    def is_first(self, chunk: Int32[Array, ""]) -> Bool[Array, ""]:
        """Say whether this rank's `chunk` is the first stage."""
        return (self.rank == 0) & (chunk == 0)

    @property
    def on_last_rank(self) -> Bool[Array, ""]:
        """Say whether this is the rank of the last stage."""
        return self.rank == self.schedule.ranks - 1


def rows_of(x: Any, labels: Int32[Array, "M P t"]) -> jax.ShapeDtypeStruct:
    """Return the shape of one rank's rows, x being like the output of the last stage."""
    return jax.ShapeDtypeStruct((labels.shape[2], x.shape[-1]), x.dtype)


def assemble(
    schedule: Schedule, functions: Parts, accumulators: Parts | None, data: Tree, labels: Array
) -> Setup:
    """Trace the three parts, each once, and lay out the schedule.

    Raises: ValueError if a stage's output is not like its input.
    """
    tables = segments.tables(schedule)
    given = Parts(None, None, None)
    if accumulators is not None:
        given = accumulators._replace(body=pick(accumulators.body, 0))

    def first(accumulators: Tree, _: None, data: Tree) -> Any:
        return functions.first(accumulators, data)

    def last(accumulators: Tree, rows: Array, labels: Array) -> Any:
        return None, *functions.last(accumulators, rows, labels)

    def trace(
        function: Callable[..., Any], accumulators: Tree, x: Tree, known: Known
    ) -> DeferredVjp:
        if schedule.forward_only:
            return forward_only_vjp(function, x, known)
        return deferred_vjp(function, accumulators, x, known)

    one, chunk = pick(data, 0), vary_everywhere(jnp.int32(0))
    start = trace(first, given.first, None, Known(one))
    x = blank(start.shapes.output)
    body = trace(functions.body, given.body, x, Known(one, (chunk,)))
    _check_stage(x, body.shapes.output)
    rows = blank(rows_of(x, labels))
    return Setup(
        schedule=schedule,
        segments=segments.segments(schedule),
        forward=segments.as_rows(tables.forward),
        backward=segments.as_rows(tables.backward),
        num_slots=tables.num_slots,
        parts=Parts(start, body, trace(last, given.last, rows, Known(pick(labels, 0, 0)))),
        accumulators=given,
        data=data,
        labels=labels,
        rank=lax.axis_index(PIPELINE),
    )


def _check_stage(x: Array, y: jax.ShapeDtypeStruct) -> None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
            f"body makes {y.dtype}{list(y.shape)} of {x.dtype}{list(x.shape)}, but the next stage "
            "takes what this one took; return an output like the input"
        )


class Carry(NamedTuple):
    """What changes from tick to tick.

    `arrived` came from the rank before; `back` goes there at the start of the next tick. Slots hold
    residuals of the body and of the first part. The inbox has inputs that wait for the body, the
    outbox gradients that wait for the first part, `turns` gradients of losses that wait for their
    backward.
    """

    arrived: Float[Array, "..."]
    back: Float[Array, "..."]
    slots: list[Array]
    first_slots: list[Array]
    inbox: Float[Array, "..."]
    outbox: Float[Array, "..."]
    turns: Float[Array, "M t D"]
    gradients: Parts
    sums: Parts


def at_the_start(setup: Setup) -> Carry:
    """Return empty buffers, and zero gradients and sums."""
    program, schedule, x = setup.segments, setup.schedule, setup.x
    sums = Parts(*(part.shapes.sums for part in setup.parts))
    return Carry(
        arrived=blank(x),
        back=blank(x),
        slots=blank(setup.parts.body.shapes.saved, setup.num_slots),
        first_slots=blank(setup.parts.first.shapes.saved, program.first_slots),
        inbox=blank(x, program.inbox_groups * schedule.ranks),
        outbox=blank(x, program.outbox_groups * schedule.ranks),
        turns=blank(setup.rows, schedule.microbatches if program.turns_wait else 0),
        gradients=zeros(setup.accumulators)._replace(
            body=zeros(setup.accumulators.body, schedule.chunks)
        ),
        sums=zeros(sums)._replace(body=zeros(sums.body, schedule.chunks)),
    )
