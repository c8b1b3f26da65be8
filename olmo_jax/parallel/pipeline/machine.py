"""What the executor sets up before the first tick: traced parts, tables, places to write to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from olmo_jax.parallel.pipeline import segments as plan
from olmo_jax.parallel.pipeline.parts import Parts, Tree, blank, own, pick, zeros
from olmo_jax.parallel.pipeline.residuals import Cut, Known, cut, without_backward
from olmo_jax.parallel.pipeline.schedule import Schedule
from olmo_jax.parallel.pipeline.transfers import AXIS


@dataclass(frozen=True)
class Machine:
    """All that stays the same from tick to tick.

    `labels` are divided by rank, with rows that do not count at the end. The body's sinks are those
    of one chunk.
    """

    schedule: Schedule
    program: plan.Segments
    forward: Int32[np.ndarray, "ticks ranks 4"]
    backward: Int32[np.ndarray, "ticks ranks 4"]
    num_slots: int
    cuts: Parts
    sinks: Parts
    data: Tree
    labels: Int32[Array, "M P t"]
    rank: Int32[Array, ""]

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        """Return the shape of what goes from stage to stage."""
        return self.cuts.first.shapes.output

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
    schedule: Schedule, functions: Parts, sinks: Parts | None, data: Tree, labels: Array
) -> Machine:
    """Trace the three parts, each once, and lay out the schedule.

    Raises: ValueError if a stage's output is not like its input.
    """
    tables = plan.tables(schedule)
    given = Parts(None, None, None)
    if sinks is not None:
        given = sinks._replace(body=pick(sinks.body, 0))

    def first(sinks: Tree, _: None, data: Tree) -> Any:
        return functions.first(sinks, data)

    def last(sinks: Tree, rows: Array, labels: Array) -> Any:
        return None, *functions.last(sinks, rows, labels)

    def trace(function: Callable[..., Any], sinks: Tree, x: Tree, known: Known) -> Cut:
        if schedule.forward_only:
            return without_backward(function, x, known)
        return cut(function, sinks, x, known)

    one, chunk = pick(data, 0), own(jnp.int32(0))
    start = trace(first, given.first, None, Known(one))
    x = blank(start.shapes.output)
    body = trace(functions.body, given.body, x, Known(one, (chunk,)))
    _check_stage(x, body.shapes.output)
    rows = blank(rows_of(x, labels))
    return Machine(
        schedule=schedule,
        program=plan.segments(schedule),
        forward=plan.as_rows(tables.forward),
        backward=plan.as_rows(tables.backward),
        num_slots=tables.num_slots,
        cuts=Parts(start, body, trace(last, given.last, rows, Known(pick(labels, 0, 0)))),
        sinks=given,
        data=data,
        labels=labels,
        rank=lax.axis_index(AXIS),
    )


def _check_stage(x: Array, y: jax.ShapeDtypeStruct) -> None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
            f"body makes {y.dtype}{list(y.shape)} of {x.dtype}{list(x.shape)}, but the next stage "
            "takes what this one took; return an output like the input"
        )


class Carry(NamedTuple):
    """What changes from tick to tick.

    `arrived` came from the rank before; `back` goes there at the head of the next tick. Slots hold
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


def at_the_start(machine: Machine) -> Carry:
    """Return empty places, and zero gradients and sums."""
    program, schedule, x = machine.program, machine.schedule, machine.x
    sums = Parts(*(part.shapes.sums for part in machine.cuts))
    return Carry(
        arrived=blank(x),
        back=blank(x),
        slots=blank(machine.cuts.body.shapes.kept, machine.num_slots),
        first_slots=blank(machine.cuts.first.shapes.kept, program.first_slots),
        inbox=blank(x, program.inbox_groups * schedule.ranks),
        outbox=blank(x, program.outbox_groups * schedule.ranks),
        turns=blank(machine.rows, schedule.microbatches if program.turns_wait else 0),
        gradients=zeros(machine.sinks)._replace(body=zeros(machine.sinks.body, schedule.chunks)),
        sums=zeros(sums)._replace(body=zeros(sums.body, schedule.chunks)),
    )
