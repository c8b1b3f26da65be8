"""Gradients of one optimizer step on one device: FP32 sums over its microbatches, added in place.

The loop is the same for every method. What a device keeps of a weight, and so what moves inside
the loop, follows from the specs: see `mesh/rules.py`.
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
from olmo_jax.mesh.rules import Cuts, cuts
from olmo_jax.model.objective import Divisors, Sums, batch_sums, divide, total
from olmo_jax.model.placement import Placement
from olmo_jax.model.transformer import Params, by_chunk, by_period
from olmo_jax.ops.varying import vary_over
from olmo_jax.parallel import fsdp, units
from olmo_jax.train.state import Layout

MICROBATCHES = "microbatches"
"""The named scope of the loop over microbatches."""


@dataclass(frozen=True)
class Resident:
    """What a device keeps of the weights through a step: `shards`, the body's by period.

    Under a pipeline they are [chunks, periods, layers of a period, ...].
    """

    layout: Layout
    stacked: Params
    shards: Params

    @classmethod
    def of(cls, layout: Layout, weights: Params) -> "Resident":
        """Take weights as this device's own, so that their gradients stay on it."""
        own = units.own(weights)
        by = by_period if layout.body is None else by_chunk
        return cls(layout, own, by(layout.config.model, own))

    @property
    def gathers_once(self) -> bool:
        """Say whether weights are gathered once for all microbatches of the step."""
        parallel = self.layout.config.parallel
        return parallel.method == "fsdp" and parallel.reshard == "step"

    def cuts(self, name: str) -> Cuts:
        """Return how the shard of a leaf lies within the one that is computed with."""
        placed = self.layout.placed[name]
        return cuts(placed.compute, placed.resident)

    def weights(self) -> Params:
        """Return what the loop reads: the shards, or the weights that they make.

        Comm: with `parallel.reshard=step`, an all-gather of every cut leaf.
        """
        if not self.gathers_once:
            return self.shards
        dtype = self.layout.dtype
        return {
            name: fsdp.gather(leaf, self.cuts(name), dtype) for name, leaf in self.shards.items()
        }

    def zeros(self) -> Params:
        """Return FP32 zeros laid out as the shards: sinks, or first accumulators."""
        return units.zeros(self.shards)

    def stack(self, gradients: Params) -> Params:
        """Return gradients of the shards, the body's no longer by period."""
        return {name: leaf.reshape(self.stacked[name].shape) for name, leaf in gradients.items()}

    def pair(self, weights: Params, sinks: Params) -> dict[str, units.Kept]:
        """Give each weight the place that its gradient goes to."""
        return {
            name: units.Kept(
                weight,
                sinks[name],
                self.cuts(name),
                gathered=self.gathers_once,
                dtype=self.layout.dtype,
            )
            for name, weight in weights.items()
        }


def accumulate(
    resident: Resident,
    placement: Placement,
    router_bias: Params,
    batch: Batch,
    divisors: Divisors,
    step: Int32[Array, ""],
) -> tuple[Params, Sums]:
    """Return this device's FP32 gradients, laid out as its shards, and its sums.

    A layer's gradient is added to its place in the accumulator while the backward pass walks over
    the layers: no second tree of gradients exists.
    """
    config = resident.layout.config
    router_bias = by_period(config.model, router_bias)
    accumulators = {name: jax.new_ref(zeros) for name, zeros in resident.zeros().items()}
    weights = resident.weights()

    def share(weights: Params, rows: Batch, sinks: Params) -> tuple[Float32[Array, ""], Sums]:
        params = {**resident.pair(weights, sinks), **router_bias}
        sums = batch_sums(config, params, rows, placement, step=step, training=True)
        return total(config, divide(sums, divisors)), sums

    def microbatch(_: None, rows: Batch) -> tuple[None, Sums]:
        backward: Any
        loss, backward, sums = jax.vjp(
            partial(share, weights, rows), resident.zeros(), has_aux=True
        )
        backward.with_refs(accumulators)(vary_over(jnp.ones_like(loss), AXES))
        return None, sums

    with jax.named_scope(MICROBATCHES):
        _, sums = lax.scan(microbatch, None, batch)
    gradients = {name: jax.freeze(each) for name, each in accumulators.items()}
    return resident.stack(gradients), jax.tree.map(
        lambda value: value.sum(axis=0, dtype=value.dtype), sums
    )


def entropy(
    resident: Resident, placement: Placement, router_bias: Params, batch: Batch
) -> Float32[Array, ""]:
    """Return this device's part of the summed cross entropy; nothing is differentiated."""
    config = resident.layout.config
    bias = by_period(config.model, router_bias)
    weights, step = resident.weights(), vary_over(jnp.int32(0), AXES)

    def microbatch(_: None, rows: Batch) -> tuple[None, Float32[Array, ""]]:
        params = {**resident.pair(weights, resident.zeros()), **bias}
        sums = batch_sums(config, params, rows, placement, step=step, training=False)
        return None, sums.cross_entropy

    return lax.scan(microbatch, None, batch)[1].sum()
