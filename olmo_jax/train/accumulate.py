"""Gradients of one optimizer step on one device: FP32 sums over its microbatches, added in place.

The loop is the same for every method. What a device stores of a weight, and so what moves inside
the loop, follows from the specs: see `mesh/specs.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from olmo_jax.data.batch import Batch
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import Layout
from olmo_jax.mesh.specs import AddedAxes, added_axes
from olmo_jax.model.execution import Execution
from olmo_jax.model.objective import Divisors, LossSums, batch_sums, divide, total
from olmo_jax.model.transformer import Params, by_chunk, by_period
from olmo_jax.ops.varying import vary_everywhere, vary_over
from olmo_jax.parallel import fsdp
from olmo_jax.parallel.unshard import WeightShard, zeros
from olmo_jax.train.state import compute_dtype

MICROBATCHES = "microbatches"
"""The named scope of the loop over microbatches; how a reader of programs finds the loop."""


@dataclass(frozen=True)
class Resident:
    """What a device stores of the weights through a step: `shards`, the body's by period.

    Under a pipeline they are [chunks, periods, layers of a period, ...].
    """

    layout: Layout
    stacked: Params
    shards: Params

    @classmethod
    def of(cls, layout: Layout, weights: Params) -> "Resident":
        """Take weights as this device's own, so that their gradients stay on it."""
        varying = vary_everywhere(weights)
        by = by_period if layout.stages is None else by_chunk
        return cls(layout, varying, by(layout.model, varying))

    @property
    def gathers_once(self) -> bool:
        """Say whether weights are gathered once for all microbatches of the step."""
        parallel = self.layout.config.parallel
        return parallel.method == "fsdp" and parallel.reshard == "step"

    def added_axes(self, name: str) -> AddedAxes:
        """Return how the shard of a leaf lies within the one that is computed with."""
        specs = self.layout.specs[name]
        return added_axes(specs.compute, specs.resident)

    def weights(self) -> Params:
        """Return what the loop reads: the shards, or the weights that they make.

        Comm: with `parallel.reshard=step`, an all-gather of every leaf that is divided.
        """
        if not self.gathers_once:
            return self.shards
        dtype = compute_dtype(self.layout)
        return {
            name: fsdp.gather(leaf, self.added_axes(name), dtype)
            for name, leaf in self.shards.items()
        }

    def zeros(self) -> Params:
        """Return FP32 zeros laid out as the shards."""
        return zeros(self.shards)

    def stack(self, gradients: Params) -> Params:
        """Return gradients of the shards, the body's no longer by period."""
        return {name: leaf.reshape(self.stacked[name].shape) for name, leaf in gradients.items()}

    def pair(self, weights: Params, accumulators: Params) -> dict[str, WeightShard]:
        """Tie each weight to the accumulator of its gradient."""
        return {
            name: WeightShard(
                weight,
                accumulators[name],
                self.added_axes(name),
                gathered=self.gathers_once,
                dtype=compute_dtype(self.layout),
            )
            for name, weight in weights.items()
        }


def accumulate(
    resident: Resident,
    execution: Execution,
    expert_bias: Params,
    batch: Batch,
    divisors: Divisors,
    step: Int32[Array, ""],
) -> tuple[Params, LossSums]:
    """Return this device's FP32 gradients, laid out as its shards, and its sums.

    A layer's gradient is added to its slice of the accumulator while the backward pass runs through
    the layers: no second tree of gradients exists.
    """
    config = resident.layout.config
    expert_bias = by_period(config.model, expert_bias)
    # The gradients live in refs, which the loop adds to. As the carry of a scan they would exist
    # twice: the sum so far, and a microbatch's own tree, which is added when it is whole.
    totals = {name: jax.new_ref(zero) for name, zero in resident.zeros().items()}
    weights = resident.weights()

    def share(
        weights: Params, rows: Batch, accumulators: Params
    ) -> tuple[Float32[Array, ""], LossSums]:
        params = {**resident.pair(weights, accumulators), **expert_bias}
        sums = batch_sums(config, params, rows, execution, step)
        return total(config, divide(sums, divisors)), sums

    def microbatch(_: None, rows: Batch) -> tuple[None, LossSums]:
        # The accumulators are zeros and nobody reads them: autodiff only needs an input whose
        # cotangent is the FP32 gradient of each weight (`parallel.ddp.attach`).
        backward: Any
        loss, backward, sums = jax.vjp(
            partial(share, weights, rows), resident.zeros(), has_aux=True
        )
        # The backward pass of each layer adds to its slice of a ref. The loss differs from device
        # to device, so its cotangent has to vary over all axes too.
        backward.with_refs(totals)(vary_over(jnp.ones_like(loss), AXES))
        return None, sums

    with jax.named_scope(MICROBATCHES):
        _, sums = lax.scan(microbatch, None, batch)
    gradients = {name: jax.freeze(each) for name, each in totals.items()}
    return resident.stack(gradients), jax.tree.map(
        lambda value: value.sum(axis=0, dtype=value.dtype), sums
    )


def entropy(
    resident: Resident, execution: Execution, expert_bias: Params, batch: Batch
) -> Float32[Array, ""]:
    """Return this device's part of the summed cross entropy; nothing is differentiated."""
    config = resident.layout.config
    bias = by_period(config.model, expert_bias)
    weights, step = resident.weights(), vary_over(jnp.int32(0), AXES)

    def microbatch(_: None, rows: Batch) -> tuple[None, Float32[Array, ""]]:
        params = {**resident.pair(weights, resident.zeros()), **bias}
        sums = batch_sums(config, params, rows, execution, step)
        return None, sums.cross_entropy

    return lax.scan(microbatch, None, batch)[1].sum()
