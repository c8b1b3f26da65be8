"""A schedule executed: forward, losses and backward of a pipelined model in one program.

A model has three parts. The body's layers are divided over `pipeline`; a stage is one chunk of
them. The first part (embedding, leading blocks) and the last (norm, head, loss) are replicated over
`pipeline` and their work is divided: the first part's by microbatch, one of each group of P on each
rank, the last part's by row.

Every rank runs the same program. In a tick each runs a forward and a backward of some chunk; a rank
that the schedule leaves idle runs one whose results are not used. Control flow depends on the
schedule alone: scans of known length, no conditional (see `segments`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from olmo_jax.ops.varying import vary_everywhere
from olmo_jax.parallel.pipeline import segments
from olmo_jax.parallel.pipeline.parts import Parts, Tree, pick
from olmo_jax.parallel.pipeline.schedule import Schedule
from olmo_jax.parallel.pipeline.setup import Carry, Setup, assemble, at_the_start
from olmo_jax.parallel.pipeline.ticks import advance, argument

__all__ = ["Parts", "pick", "run"]


def run(
    schedule: Schedule,
    functions: Parts,
    *,
    accumulators: Parts | None,
    data: Tree,
    labels: Int32[Array, "M T"],
    ignored: int,
) -> tuple[Parts | None, Parts]:
    """Return this device's (gradients, sums) over all microbatches; runs inside `shard_map`.

    The functions each return a share of the objective, which is differentiated (FP32, its global
    divisors in it), and sums, which are not (counts, losses to report):

    - `first(accumulators, data) -> (x, share, sums)`: a microbatch's input to the body;
    - `body(accumulators, x, data, chunk) -> (y, share, sums)`: one of this rank's chunks; y has
      the shape and dtype of x;
    - `last(accumulators, rows, labels) -> (share, sums)`: some rows [t, D] of the body's output,
      and their labels [t], `ignored` for a row outside the loss mask.

    They close over the weights, as this device's own (varying over all axes), and over whatever
    else is the same for all microbatches. What differs is `data`, leaves [M, ...], which all
    pipeline ranks have. A loop over layers reads one layer at a time, `pick(weights, chunk,
    layer)`: a whole chunk would be copied.

    The gradient is taken of the `accumulators`: FP32 zeros that nobody reads, tied to weights
    (`ddp.attach`). The body's are [chunks, ...], and `body` gets one chunk's. Gradients have the
    shapes of the accumulators and are added up in place. Sums are added up in their own dtype; the
    body's come as [chunks, ...].

    A layer must stand under `jax.checkpoint` with an allow-list of names. What backward needs
    beyond weights and data lies in slots, as many as a rank has live activations (see
    `segments.Tables`).

    With a schedule of forwards alone, `accumulators` is None, each function gets None for them,
    and the gradients are None.

    Comm: along `pipeline`, in the dtype of x: two permutes of x a tick; a reduce-scatter and an
        all-gather of x a microbatch (its rows to and from the last part); an all-gather of x and a
        reduce-scatter of P times x a group of P microbatches (to and from the first part).
    Raises: ValueError for arrays that do not fit the schedule.
    """
    _check(schedule, accumulators, (data, labels))
    padded = _by_rank(vary_everywhere(labels), schedule.ranks, ignored)
    setup = assemble(schedule, functions, accumulators, vary_everywhere(data), padded)
    carry = at_the_start(setup)
    for loop in setup.segments.loops:
        carry = _loop(setup, carry, loop)
    return (None if accumulators is None else carry.gradients), carry.sums


def _check(schedule: Schedule, accumulators: Parts | None, data: Tree) -> None:
    if (accumulators is None) != schedule.forward_only:
        given, rule = (
            ("no accumulators", "needs")
            if accumulators is None
            else ("accumulators", "has no use for")
        )
        raise ValueError(f"{given} given, but the {schedule.name} schedule {rule} them")
    for leaf in jax.tree.leaves(data):
        if leaf.shape[0] != schedule.microbatches:
            raise ValueError(
                f"data or labels of shape {list(leaf.shape)}, but the schedule has "
                f"{schedule.microbatches} microbatches; give as many along the leading dim"
            )


def _by_rank(labels: Int32[Array, "M T"], ranks: int, ignored: int) -> Int32[Array, "M P t"]:
    """Return the labels of each rank's rows, with ignored rows at the end."""
    more = -labels.shape[1] % ranks
    padded = jnp.pad(labels, ((0, 0), (0, more)), constant_values=ignored)
    return padded.reshape(len(labels), ranks, -1)


def _loop(setup: Setup, carry: Carry, loop: segments.RepeatedSteps) -> Carry:
    """Run like iterations: one as it is, several as a scan."""
    arguments = [[argument(setup, step) for step in iteration] for iteration in loop]

    def once(carry: Carry, arguments: list[Any]) -> tuple[Carry, None]:
        for step, numbers in zip(loop[0], arguments, strict=True):
            carry = advance(setup, carry, step, numbers)
        return carry, None

    if len(loop) == 1:
        return once(carry, jax.tree.map(jnp.asarray, arguments[0]))[0]
    # Iterations differ in numbers alone, which become the scan's inputs: one copy of the code.
    stacked = jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *arguments)
    return lax.scan(once, carry, stacked)[0]
