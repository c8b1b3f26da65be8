"""Gradients of one optimizer step on one device of a pipeline, and the losses of an evaluation.

The model's three parts as the executor takes them: embedding and leading blocks, one chunk of the
body, final norm and loss. After it a step goes on as without a pipeline.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.layers import EMPTY, Grid, layer_plan
from olmo_jax.config.records import Config
from olmo_jax.data.batch import IGNORED, Batch
from olmo_jax.mesh.axes import AXES
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.objective import Divisors, Sums, divide, labels_that_count, leave, total
from olmo_jax.model.placement import Placement
from olmo_jax.model.transformer import Params, Take, Walk, enter, stack_sums, unit, walk
from olmo_jax.ops.varying import vary_over
from olmo_jax.parallel import units
from olmo_jax.parallel.pipeline.executor import Parts, pick, run
from olmo_jax.parallel.pipeline.transfers import AXIS
from olmo_jax.plan.passes import schedule_of
from olmo_jax.train.accumulate import MICROBATCHES, Resident
from olmo_jax.train.state import Layout


def accumulate(
    resident: Resident,
    placement: Placement,
    router_bias: Params,
    batch: Batch,
    divisors: Divisors,
    step: Int32[Array, ""],
) -> tuple[Params, Sums]:
    """Return this device's FP32 gradients, laid out as its shards, and its sums.

    As `train.accumulate.accumulate`, over a pipeline. What the ranks hold of one sum adds up to it:
    a body layer's are on its own rank and zero on the others.
    """
    model = _Model.of(resident, placement, router_bias, divisors, step, training=True)
    gradients, sums = model.run(batch)
    assert gradients is not None
    first, body, last = gradients
    # A tied embedding is read at both ends.
    both = {name: leaf + last[name] for name, leaf in first.items() if name in last}
    return resident.stack({**first, **last, **both, **body}), sums


def entropy(
    resident: Resident, placement: Placement, router_bias: Params, batch: Batch
) -> Float32[Array, ""]:
    """Return this device's part of the summed cross entropy; nothing is differentiated."""
    one, step = vary_over(jnp.float32(1), AXES), vary_over(jnp.int32(0), AXES)
    divisors = Divisors(one, one)
    model = _Model.of(resident, placement, router_bias, divisors, step, training=False)
    return model.run(batch)[1].cross_entropy


@dataclass(frozen=True)
class _Model:
    """The model as one pipeline rank has it; `first`, `body` and `last` are the executor's parts.

    `numbers` are the model's layers in this rank's places.
    """

    resident: Resident
    placement: Placement
    weights: Params
    router_bias: Params
    numbers: Int32[Array, "chunks periods members"]
    divisors: Divisors
    step: Int32[Array, ""]
    training: bool

    @classmethod
    def of(
        cls,
        resident: Resident,
        placement: Placement,
        router_bias: Params,
        divisors: Divisors,
        step: Int32[Array, ""],
        *,
        training: bool,
    ) -> "_Model":
        layout = resident.layout
        plan, grid = layer_plan(layout.config.model), _grid(layout)
        rank = lax.axis_index(AXIS)

        def places(value: Array) -> Array:
            """Return this rank's places of a value that has one entry for every place."""
            own = jnp.take(value.reshape(*grid.layer.shape, *value.shape[1:]), rank, axis=1)
            return own.reshape(len(own), -1, plan.period, *own.shape[2:])

        numbers = places(jnp.asarray(grid.model_layers(plan)).reshape(-1))
        bias = {
            name: places(_with_empty(leaf, grid)) if name.startswith("body.") else leaf
            for name, leaf in router_bias.items()
        }
        weights = resident.weights()
        return cls(resident, placement, weights, bias, numbers, divisors, step, training)

    @property
    def _config(self) -> Config:
        return self.resident.layout.config

    def run(self, batch: Batch) -> tuple[Parts | None, Sums]:
        """Run a step's or an evaluation's microbatches through the pipeline."""
        labels, layout = labels_that_count(batch), self.resident.layout
        with jax.named_scope(MICROBATCHES):
            gradients, sums = run(
                schedule_of(self._config, layout.sizes, training=self.training),
                Parts(self.first, self.body, self.last),
                sinks=self._sinks() if self.training else None,
                data=batch,
                labels=labels.reshape(len(labels), -1),
                ignored=IGNORED,
            )
        router = stack_sums(sums.first, self._of_all_ranks(sums.body))
        return gradients, Sums(sums.last[0], sums.last[1], router)

    def _sinks(self) -> Parts:
        """Return the places of all gradients, by part of the model."""
        last = ["head."] + ["embedding.weight"] * self._config.model.tie_embeddings
        prefixes = Parts(("embedding.", "leading."), ("body.",), tuple(last))
        zeros = self.resident.zeros()
        return Parts(
            *({name: zeros[name] for name in zeros if name.startswith(part)} for part in prefixes)
        )

    def _params(self, sinks: Params) -> dict[str, Any]:
        """Return what the units read of one part of the model, the one that `sinks` are of."""
        weights = {name: self.weights[name] for name in sinks}
        return {**self.resident.pair(weights, sinks), **self.router_bias}

    def _walk(self, rows: Batch) -> Walk:
        return walk(
            self._config.model,
            rows,
            self.placement,
            step=self.step,
            seed=self._config.seed,
            training=self.training,
        )

    def _share(self, sums: Sums) -> Float32[Array, ""]:
        return total(self._config, divide(sums, self.divisors))

    def _router_share(self, router: RouterSums | None) -> Float32[Array, ""]:
        return self._share(Sums(jnp.zeros(()), jnp.zeros(()), router))

    def first(
        self, sinks: Params | None, rows: Batch
    ) -> tuple[Float[Array, "B L D"], Float32[Array, ""], list[RouterSums | None]]:
        """Return a microbatch's input of the body."""
        params = self._params(self._sinks().first if sinks is None else sinks)
        x, sums = enter(self._walk(rows), params, rows.tokens)
        shares = [self._router_share(one) for one in sums]
        return x, sum(shares, jnp.zeros(())), sums

    def body(
        self,
        sinks: Params | None,
        x: Float[Array, "B L D"],
        rows: Batch,
        chunk: Int32[Array, ""],
    ) -> tuple[Float[Array, "B L D"], Float32[Array, ""], RouterSums | None]:
        """Run one chunk's layers, a period at a time; an empty place passes its input on."""
        way, plan = self._walk(rows), layer_plan(self._config.model)
        sinks = pick(self._sinks().body, 0) if sinks is None else sinks
        numbers = pick(self.numbers, chunk)
        is_full = _grid(self.resident.layout).waste == 0

        def one_period(x: Array, period: tuple[Any, ...]) -> tuple[Array, RouterSums | None]:
            index, sinks, numbers, there = period
            stored, sums = unit(self._params(sinks), "body"), []
            for member, like in enumerate(plan.body[: plan.period]):
                take = _take(chunk, index, member)
                number = jnp.maximum(numbers[member], 0)
                y, layer_sums = way.block(stored, x, number, like=like, take=take, scanned=True)
                if not is_full:
                    y, layer_sums = _where(there[member], (y, layer_sums), x)
                x = y
                sums.append(layer_sums)
            return x, jax.tree.map(lambda *values: jnp.stack(values), *sums)

        index = vary_over(jnp.arange(len(numbers)), AXES)
        x, sums = lax.scan(one_period, x, (index, sinks, numbers, numbers != EMPTY))
        sums = jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sums)
        return x, self._router_share(sums), sums

    def last(
        self, sinks: Params | None, rows: Float[Array, "t D"], labels: Int32[Array, " t"]
    ) -> tuple[Float32[Array, ""], tuple[Float32[Array, ""], Float32[Array, ""]]]:
        """Return the losses of some rows of the body's output."""
        params = self._params(self._sinks().last if sinks is None else sinks)
        sums = leave(self._config, params, rows[None], labels[None], self.placement)
        return self._share(Sums(*sums, None)), sums

    def _of_all_ranks(self, sums: RouterSums | None) -> RouterSums | None:
        """Return the body's sums in layer order, those of other ranks' layers zero."""
        grid = _grid(self.resident.layout)

        def in_order(own: Array) -> Array:
            everywhere = jnp.zeros((*grid.layer.shape, *own.shape[2:]), own.dtype)
            everywhere = vary_over(everywhere, AXES)
            everywhere = lax.dynamic_update_slice_in_dim(
                everywhere, own[:, None], lax.axis_index(AXIS), 1
            )
            return everywhere.reshape(-1, *own.shape[2:])[: grid.num_layers]

        return jax.tree.map(in_order, sums)


def _grid(layout: Layout) -> Grid:
    assert layout.body is not None
    return layout.body


def _with_empty(value: Float[Array, "layers ..."], grid: Grid) -> Float[Array, "places ..."]:
    return jnp.pad(value, ((0, grid.waste), *[(0, 0)] * (value.ndim - 1)))


def _take(chunk: Int32[Array, ""], index: Int32[Array, ""], member: int) -> Take:
    """Return what takes one layer: of all weights where they lie, of sinks in its period."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, units.Kept):
            return pick(leaf, chunk, index, member)
        weight = pick(leaf.weight, chunk, index, member)
        return replace(leaf, weight=weight, sink=leaf.sink[member])

    return partial(jax.tree.map, one, is_leaf=lambda leaf: isinstance(leaf, units.Kept))


def _where(
    there: Bool[Array, ""], layer: tuple[Array, RouterSums | None], x: Array
) -> tuple[Array, RouterSums | None]:
    """Return what a layer made of x, or x and no sums if the place is empty."""
    y, sums = layer
    kept = jax.tree.map(lambda value: jnp.where(there, value, jnp.zeros_like(value)), sums)
    return jnp.where(there, y, x), kept
