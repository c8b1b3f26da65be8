"""The work of a pipeline step: a tick of forwards, losses and backwards, and the group events."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from olmo_jax.ops.varying import vary_everywhere
from olmo_jax.parallel.pipeline import segments
from olmo_jax.parallel.pipeline.deferred_backward import Known
from olmo_jax.parallel.pipeline.parts import pick, put
from olmo_jax.parallel.pipeline.schedule import Ops
from olmo_jax.parallel.pipeline.setup import Carry, Setup
from olmo_jax.parallel.pipeline.transfers import join, send_back, send_on, share_out

_MICROBATCH = Ops._fields.index("microbatch")


class Op(NamedTuple):
    """What one rank runs: an entry of `Ops`."""

    valid: Bool[Array, ""]
    chunk: Int32[Array, ""]
    microbatch: Int32[Array, ""]
    slot: Int32[Array, ""]


def argument(setup: Setup, step: segments.Step) -> Any:
    """Return the numbers in which a step differs from those that are like it."""
    if isinstance(step, segments.Ticks):
        inside = slice(step.start, step.stop)
        return setup.forward[inside], setup.backward[inside]
    return np.int32(step.group)


def advance(setup: Setup, carry: Carry, step: segments.Step, argument: Any) -> Carry:
    """Run a step, with the argument of this step or of a like one."""
    if isinstance(step, segments.FirstForward):
        return _first_forward(setup, carry, argument)
    if isinstance(step, segments.FirstBackward):
        return _first_backward(setup, carry, argument)

    def one(carry: Carry, rows: Any) -> tuple[Carry, None]:
        return _tick(setup, step, carry, *rows), None

    return lax.scan(one, carry, argument)[0]


def _tick(
    setup: Setup,
    ticks: segments.Ticks,
    carry: Carry,
    forward: Int32[Array, "P 4"],
    backward: Int32[Array, "P 4"],
) -> Carry:
    """Run one tick.

    The last tick's gradient travels behind the forward, this one's activation behind what follows.
    The barriers say so: XLA would start a transfer where nothing is left to hide it, or move the
    activation's, in a loop whose last one nobody reads, to the head of the next tick.
    """
    #     compute   | forward of a chunk      | loss | backward of a chunk |
    #     network   | <- gradient of tick t-1 | activation of tick t ->    |
    #
    # Neither transfer waits for the work beside it: the backward reads the gradient that arrived
    # behind the forward, and the activation is for the next tick.
    back, y, rows, d_rows = carry.back, carry.arrived, None, None
    if ticks.backward:
        back = send_back(back)
    if ticks.forward:
        carry, y = _forward(setup, carry, _op(setup, forward))
        # The gradient has arrived before the activation leaves.
        y, back = lax.optimization_barrier((y, back))
    if ticks.loss:
        rows = _share_rows(setup, y)
        # The loss waits for its rows, so they leave before the activation.
        y, rows = lax.optimization_barrier((y, rows))
    if ticks.forward:
        # The barrier ties the transfer to this tick.
        carry = carry._replace(arrived=lax.optimization_barrier(send_on(y)))
    if rows is not None:
        carry, d_rows = _loss(setup, carry, rows, forward[-1, _MICROBATCH])
    if not ticks.turn:
        d_rows = None
    elif setup.segments.turns_wait:
        d_rows = pick(carry.turns, backward[-1, _MICROBATCH])
    if not ticks.backward:
        return carry
    return _backward(setup, carry, _op(setup, backward), back, d_rows)


def _op(setup: Setup, row: Int32[Array, "P 4"]) -> Op:
    """Return this rank's entry. The number of an only chunk is static."""
    valid, chunk, microbatch, slot = vary_everywhere(row[setup.rank])
    if setup.schedule.chunks == 1:
        chunk = vary_everywhere(jnp.int32(0))
    return Op(valid == 1, chunk, microbatch, slot)


def _forward(setup: Setup, carry: Carry, op: Op) -> tuple[Carry, Float[Array, "..."]]:
    """Run a chunk forward and save its residuals."""
    # The inbox is a ring of groups. Microbatch m is number m modulo its size: groups are whole.
    index = op.microbatch % (setup.segments.inbox_groups * setup.schedule.ranks)
    x = jnp.where(setup.is_first(op.chunk), pick(carry.inbox, index), carry.arrived)
    known = Known(pick(setup.data, op.microbatch), (op.chunk,))
    result = setup.parts.body.forward(setup.accumulators.body, x, known)
    total = pick(carry.sums.body, op.chunk)
    total = jax.tree.map(
        lambda old, new: old + jnp.where(op.valid, new, jnp.zeros_like(new)), total, result.sums
    )
    sums = carry.sums._replace(body=put(carry.sums.body, total, op.chunk))
    slots = put(carry.slots, result.saved, op.slot)
    return carry._replace(slots=slots, sums=sums), result.output


def _share_rows(setup: Setup, y: Float[Array, "..."]) -> Float[Array, "t D"]:
    """Return this rank's rows of the last rank's y, padded so that they divide."""
    rows = y.reshape(-1, y.shape[-1])
    more = setup.rows.shape[0] * setup.schedule.ranks - rows.shape[0]
    padded = jnp.pad(rows, ((0, more), (0, 0)))
    return share_out(padded, setup.on_last_rank, scope="share_rows")


def _loss(
    setup: Setup, carry: Carry, rows: Float[Array, "t D"], microbatch: Int32[Array, ""]
) -> tuple[Carry, Float[Array, "t D"] | None]:
    """Run the last part on this rank's rows, and back at once."""
    known = Known(pick(setup.labels, microbatch, setup.rank))
    part, accumulators = setup.parts.last, setup.accumulators.last
    result = part.forward(accumulators, rows, known)
    last = jax.tree.map(jnp.add, carry.sums.last, result.sums)
    carry = carry._replace(sums=carry.sums._replace(last=last))
    if setup.schedule.forward_only:
        return carry, None
    one = vary_everywhere(jnp.float32(1))
    last, d_rows = part.backward(
        result.saved, accumulators, rows, known, (None, one), carry.gradients.last
    )
    carry = carry._replace(gradients=carry.gradients._replace(last=last))
    if setup.segments.turns_wait:
        carry = carry._replace(turns=put(carry.turns, d_rows, microbatch))
    return carry, d_rows


def _backward(
    setup: Setup,
    carry: Carry,
    op: Op,
    back: Float[Array, "..."],
    d_rows: Float[Array, "t D"] | None,
) -> Carry:
    """Run a chunk backward. An idle rank repeats one with zero cotangents: see `segments.Tables`.

    `d_rows` is the gradient of this rank's rows of a loss, in a tick of the last stage.
    """
    dy = back
    if d_rows is not None:
        rows = join(d_rows, scope="gather_row_gradients")[: np.prod(setup.x.shape[:-1])]
        dy = jnp.where(setup.on_last_rank, rows.reshape(setup.x.shape), back)
    # The backward is linear in its cotangents, so zeros add zeros: the one mask of an idle rank.
    dy = jnp.where(op.valid, dy, jnp.zeros_like(dy))
    known = Known(pick(setup.data, op.microbatch), (op.chunk,))
    added, dx = setup.parts.body.backward(
        pick(carry.slots, op.slot),
        setup.accumulators.body,
        dy,  # Stands for x: it has its shape and dtype, and x itself need not be alive.
        known,
        (dy, op.valid.astype(jnp.float32)),
        pick(carry.gradients.body, op.chunk),
    )
    body = put(carry.gradients.body, added, op.chunk)
    index = op.microbatch % (setup.segments.outbox_groups * setup.schedule.ranks)
    leaves = op.valid & setup.is_first(op.chunk)
    leaving = jnp.where(leaves, dx, pick(carry.outbox, index))
    return carry._replace(
        back=dx,
        outbox=put(carry.outbox, leaving, index),
        gradients=carry.gradients._replace(body=body),
    )


def _first_forward(setup: Setup, carry: Carry, group: Int32[Array, ""]) -> Carry:
    """Run the first part on a group's microbatches, one a rank, and bring them to rank 0."""
    program, ranks = setup.segments, setup.schedule.ranks
    known = Known(pick(setup.data, group * ranks + setup.rank))
    result = setup.parts.first.forward(setup.accumulators.first, None, known)
    entering = join(result.output[None], scope="gather_group")
    start = group % program.inbox_groups * ranks
    slots = carry.first_slots
    if not setup.schedule.forward_only:
        slots = put(slots, result.saved, group % program.first_slots)
    first = jax.tree.map(jnp.add, carry.sums.first, result.sums)
    return carry._replace(
        inbox=lax.dynamic_update_slice_in_dim(carry.inbox, entering, start, 0),
        first_slots=slots,
        sums=carry.sums._replace(first=first),
    )


def _first_backward(setup: Setup, carry: Carry, group: Int32[Array, ""]) -> Carry:
    """Hand a group's gradients out from rank 0, one microbatch a rank, and go back on each."""
    program, ranks = setup.segments, setup.schedule.ranks
    start = group % program.outbox_groups * ranks
    leaving = lax.dynamic_slice_in_dim(carry.outbox, start, ranks, 0)
    dx = share_out(leaving, setup.rank == 0, scope="scatter_group")[0]
    first, _ = setup.parts.first.backward(
        pick(carry.first_slots, group % program.first_slots),
        setup.accumulators.first,
        None,
        Known(pick(setup.data, group * ranks + setup.rank)),
        (dx, vary_everywhere(jnp.float32(1))),
        carry.gradients.first,
    )
    return carry._replace(gradients=carry.gradients._replace(first=first))
