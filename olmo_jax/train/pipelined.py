"""Gradients of one optimizer step on one device of a pipeline, and the losses of an evaluation.

The model's three parts as the executor takes them: embedding and leading blocks, one chunk of the
body, final norm and loss. The rest of a step is as without a pipeline.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.arch.labels import IGNORED
from olmo_jax.arch.layers import PADDING_LAYER, StageLayout
from olmo_jax.config.records import Config
from olmo_jax.data.batch import Batch
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import Layout
from olmo_jax.model.execution import Execution
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.objective import (
    Divisors,
    LossSums,
    divide,
    head_losses,
    masked_labels,
    total,
)
from olmo_jax.model.transformer import (
    ForwardPass,
    Params,
    Take,
    forward_pass,
    run_leading,
    stack_sums,
    unit,
)
from olmo_jax.ops.varying import vary_over
from olmo_jax.parallel.pipeline.executor import Parts, pick, run
from olmo_jax.parallel.pipeline.of_layout import schedule_of
from olmo_jax.parallel.pipeline.transfers import PIPELINE
from olmo_jax.parallel.unshard import WeightShard
from olmo_jax.train.accumulate import MICROBATCHES, Resident


def accumulate(
    resident: Resident,
    execution: Execution,
    expert_bias: Params,
    batch: Batch,
    divisors: Divisors,
    step: Int32[Array, ""],
) -> tuple[Params, LossSums]:
    """Return this device's FP32 gradients, laid out as its shards, and its sums.

    As `train.accumulate.accumulate`, over a pipeline. What the ranks hold of one sum adds up to it:
    a body layer's are on its own rank and zero on the others.
    """
    model = _Model.of(resident, execution, expert_bias, divisors, step)
    gradients, sums = model.run(batch)
    assert gradients is not None
    first, body, last = gradients
    # A tied embedding is read at both ends.
    both = {name: leaf + last[name] for name, leaf in first.items() if name in last}
    return resident.stack({**first, **last, **both, **body}), sums


def entropy(
    resident: Resident, execution: Execution, expert_bias: Params, batch: Batch
) -> Float32[Array, ""]:
    """Return this device's part of the summed cross entropy; nothing is differentiated."""
    one, step = vary_over(jnp.float32(1), AXES), vary_over(jnp.int32(0), AXES)
    divisors = Divisors(one, one)
    model = _Model.of(resident, execution, expert_bias, divisors, step)
    return model.run(batch)[1].cross_entropy


@dataclass(frozen=True)
class _Model:
    """The model as one pipeline rank has it; `first`, `body` and `last` are the executor's parts.

    `numbers` are the model's layers that this rank's stages hold.
    """

    resident: Resident
    execution: Execution
    weights: Params
    expert_bias: Params
    numbers: Int32[Array, "chunks periods members"]
    divisors: Divisors
    step: Int32[Array, ""]

    @classmethod
    def of(
        cls,
        resident: Resident,
        execution: Execution,
        expert_bias: Params,
        divisors: Divisors,
        step: Int32[Array, ""],
    ) -> "_Model":
        layout = resident.layout
        groups, stages = layout.groups, _stages(layout)
        rank = lax.axis_index(PIPELINE)

        def of_rank(value: Array) -> Array:
            """Return this rank's part of a value that has one entry for every layer of a stage."""
            own = jnp.take(value.reshape(*stages.shape, *value.shape[1:]), rank, axis=1)
            return own.reshape(len(own), -1, groups.period, *own.shape[2:])

        numbers = of_rank(jnp.asarray(stages.model_layers(groups)).reshape(-1))
        bias = {
            name: of_rank(_with_padding(leaf, stages)) if name.startswith("body.") else leaf
            for name, leaf in expert_bias.items()
        }
        return cls(resident, execution, resident.weights(), bias, numbers, divisors, step)

    @property
    def _config(self) -> Config:
        return self.resident.layout.config

    def run(self, batch: Batch) -> tuple[Parts | None, LossSums]:
        """Run a step's or an evaluation's microbatches through the pipeline."""
        labels, layout = masked_labels(batch), self.resident.layout
        with jax.named_scope(MICROBATCHES):
            gradients, sums = run(
                schedule_of(layout, training=self.execution.training),
                Parts(self.first, self.body, self.last),
                accumulators=self._accumulators() if self.execution.training else None,
                data=batch,
                labels=labels.reshape(len(labels), -1),
                ignored=IGNORED,
            )
        router = stack_sums(sums.first, self._of_all_ranks(sums.body))
        return gradients, LossSums(sums.last[0], sums.last[1], router)

    def _accumulators(self) -> Parts:
        """Return the accumulators of all gradients, by part of the model."""
        last = ["head."] + ["embedding.weight"] * self._config.model.tie_embeddings
        prefixes = Parts(("embedding.", "leading."), ("body.",), tuple(last))
        zeros = self.resident.zeros()
        return Parts(
            *({name: zeros[name] for name in zeros if name.startswith(part)} for part in prefixes)
        )

    def _params(self, accumulators: Params) -> dict[str, Any]:
        """Return what the units read of the part of the model that `accumulators` belong to."""
        weights = {name: self.weights[name] for name in accumulators}
        return {**self.resident.pair(weights, accumulators), **self.expert_bias}

    def _forward_pass(self, rows: Batch) -> ForwardPass:
        return forward_pass(self._config.model, rows, self.execution, self.step)

    def _share(self, sums: LossSums) -> Float32[Array, ""]:
        return total(self._config, divide(sums, self.divisors))

    def _router_share(self, router: RouterSums | None) -> Float32[Array, ""]:
        return self._share(LossSums(jnp.zeros(()), jnp.zeros(()), router))

    def first(
        self, accumulators: Params | None, rows: Batch
    ) -> tuple[Float[Array, "B L D"], Float32[Array, ""], list[RouterSums | None]]:
        """Return a microbatch's input of the body."""
        params = self._params(self._accumulators().first if accumulators is None else accumulators)
        x, sums = run_leading(self._forward_pass(rows), params, rows.tokens)
        shares = [self._router_share(one) for one in sums]
        return x, sum(shares, jnp.zeros(())), sums

    def body(
        self,
        accumulators: Params | None,
        x: Float[Array, "B L D"],
        rows: Batch,
        chunk: Int32[Array, ""],
    ) -> tuple[Float[Array, "B L D"], Float32[Array, ""], RouterSums | None]:
        """Run one chunk's layers, a period at a time; a padding layer passes its input on."""
        forward, groups = self._forward_pass(rows), self.resident.layout.groups
        accumulators = pick(self._accumulators().body, 0) if accumulators is None else accumulators
        numbers = pick(self.numbers, chunk)
        is_full = _stages(self.resident.layout).num_padding == 0

        def one_period(x: Array, period: tuple[Any, ...]) -> tuple[Array, RouterSums | None]:
            index, accumulators, numbers, is_layer = period
            stored, sums = unit(self._params(accumulators), "body"), []
            for member, like in enumerate(groups.body[: groups.period]):
                take = _take(chunk, index, member)
                # A padding layer runs as layer 0, on zeros for weights; its result is not used.
                number = jnp.maximum(numbers[member], 0)
                y, layer_sums = forward.block(stored, x, number, like=like, take=take, scanned=True)
                if not is_full:
                    y, layer_sums = _where(is_layer[member], (y, layer_sums), x)
                x = y
                sums.append(layer_sums)
            return x, jax.tree.map(lambda *values: jnp.stack(values), *sums)

        index = vary_over(jnp.arange(len(numbers)), AXES)
        x, sums = lax.scan(one_period, x, (index, accumulators, numbers, numbers != PADDING_LAYER))
        sums = jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sums)
        return x, self._router_share(sums), sums

    def last(
        self, accumulators: Params | None, rows: Float[Array, "t D"], labels: Int32[Array, " t"]
    ) -> tuple[Float32[Array, ""], tuple[Float32[Array, ""], Float32[Array, ""]]]:
        """Return the losses of some rows of the body's output."""
        params = self._params(self._accumulators().last if accumulators is None else accumulators)
        sums = head_losses(self._config, params, rows[None], labels[None], self.execution)
        return self._share(LossSums(*sums, None)), sums

    def _of_all_ranks(self, sums: RouterSums | None) -> RouterSums | None:
        """Return the body's sums in layer order, those of other ranks' layers zero."""
        stages = _stages(self.resident.layout)

        def in_order(own: Array) -> Array:
            # The layers of other ranks stay zero, so the sum over all ranks has each layer once.
            everywhere = jnp.zeros((*stages.shape, *own.shape[2:]), own.dtype)
            everywhere = vary_over(everywhere, AXES)
            everywhere = lax.dynamic_update_slice_in_dim(
                everywhere, own[:, None], lax.axis_index(PIPELINE), 1
            )
            return everywhere.reshape(-1, *own.shape[2:])[: stages.num_layers]

        return jax.tree.map(in_order, sums)


def _stages(layout: Layout) -> StageLayout:
    assert layout.stages is not None
    return layout.stages


def _with_padding(
    value: Float[Array, "layers ..."], stages: StageLayout
) -> Float[Array, "padded ..."]:
    return jnp.pad(value, ((0, stages.num_padding), *[(0, 0)] * (value.ndim - 1)))


def _take(chunk: Int32[Array, ""], index: Int32[Array, ""], member: int) -> Take:
    """Return what takes one layer: of all weights where they lie, of accumulators in its period."""

    def one(leaf: Any) -> Any:
        # The weights of all chunks are loop-invariant, so no copy of them is a residual. The
        # accumulator is an input of the scan: its cotangent is added layer by layer.
        if not isinstance(leaf, WeightShard):
            return pick(leaf, chunk, index, member)
        weight = pick(leaf.weight, chunk, index, member)
        return replace(leaf, weight=weight, accumulator=leaf.accumulator[member])

    return partial(jax.tree.map, one, is_leaf=lambda leaf: isinstance(leaf, WeightShard))


def _where(
    is_layer: Bool[Array, ""], layer: tuple[Array, RouterSums | None], x: Array
) -> tuple[Array, RouterSums | None]:
    """Return what a layer made of x, or x and no sums for a padding layer."""
    y, sums = layer
    kept = jax.tree.map(lambda value: jnp.where(is_layer, value, jnp.zeros_like(value)), sums)
    return jnp.where(is_layer, y, x), kept
