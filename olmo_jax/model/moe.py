"""The position-wise half of a block: a dense MLP, or routed experts beside a shared one."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.model.balance import BalanceTerms, balance_sum, balance_terms, z_sum
from olmo_jax.model.execution import Execution
from olmo_jax.model.experts import ExpertWeights, swiglu
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.router import Router, forced_experts, jitter
from olmo_jax.ops.linear import linear


class BlockInputs(NamedTuple):
    """What a block reads beside the hidden state; `offsets` count positions from the row start.

    `segment_ids` are those that attention takes: of whole rows.
    """

    positions: Int32[Array, "B L"]
    segment_ids: Int32[Array, "B row"]
    padding_mask: Bool[Array, "B L"]
    sequence: Int32[Array, " B"]
    offsets: Int32[Array, " L"]
    step: Int32[Array, ""]


def block_inputs(batch: Batch, execution: Execution, step: Int32[Array, ""]) -> BlockInputs:
    """Return what the blocks read of a microbatch."""
    return BlockInputs(
        batch.positions,
        batch.segment_ids,
        batch.padding_mask,
        batch.sequence,
        execution.rows.offsets(batch.positions.shape[1]),
        step,
    )


class RouterSums(NamedTuple):
    """One routed layer's sums over this device's tokens without padding.

    `counts` are taken before any drop, `dropped` are the routes that were dropped.
    """

    balance: Float32[Array, "*layers"]
    z: Float32[Array, "*layers"]
    counts: Int32[Array, "*layers E"]
    dropped: Int32[Array, "*layers"]


class MLP(nnx.Module):
    """SwiGLU: a dense block's, or the shared expert's.

    Source: olmo_core 3.0.0, nn/moe/v2/shared_experts.py.
    """

    def __init__(self, make: Initialiser, name: str):
        self.name = name
        self.up_gate, self.down = make("up_gate"), make("down")

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        hidden = checkpoint_name(linear(x, self.up_gate[...]), f"{self.name}_hidden")
        return checkpoint_name(linear(swiglu(hidden), self.down[...]), f"{self.name}_output")


class Experts(nnx.Module):
    """The weights of the routed experts; how rows reach them is the execution's affair.

    Source: olmo_core 3.0.0, nn/moe/v2/routed_experts.py.
    """

    def __init__(self, make: Initialiser):
        self.up_gate, self.down = make("up_gate"), make("down")

    def weights(self) -> ExpertWeights:
        """Return the arrays."""
        return ExpertWeights(self.up_gate[...], self.down[...])


class MoE(nnx.Module):
    """Routed experts, plus one ungated shared expert if the config has one.

    Source: olmo_core 3.0.0, nn/ddp/block.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.model = model
        self.router = Router(model, make.inside("router"))
        self.experts = Experts(make.inside("experts"))
        self.shared = MLP(make.inside("shared"), "shared") if make.has("shared") else None

    def _forced(
        self, inputs: BlockInputs, execution: Execution, layer: Array
    ) -> Int32[Array, "B L A"] | None:
        assignment = self.model.router.assignment
        if assignment == "learned":
            return None
        return forced_experts(
            assignment,
            execution.seed,
            inputs.step,
            layer,
            inputs.sequence,
            inputs.offsets,
            sequence_length=execution.rows.length(inputs.positions.shape[1]),
            num_experts=self.model.num_experts,
            top_k=self.model.top_k,
        )

    def _balance(self, terms: BalanceTerms, execution: Execution) -> Float32[Array, ""]:
        add = {
            "instance": execution.over_sequence,
            "microbatch": lambda value: value,
            "global": execution.over_data,
        }[self.model.router.balance_scope]
        sums = (add(terms.counts), add(terms.tokens))
        counts, tokens = (checkpoint_name(value, "balance_counts") for value in sums)
        return balance_sum(terms._replace(counts=counts, tokens=tokens), self.model.top_k)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        inputs: BlockInputs,
        execution: Execution,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "B L D"], RouterSums]:
        config, padding_mask = self.model.router, inputs.padding_mask
        seen = x
        if config.jitter_eps is not None and execution.training:
            coordinates = (layer, inputs.sequence, inputs.offsets)
            seen = jitter(x, config.jitter_eps, execution.seed, inputs.step, *coordinates)
        routing = self.router(seen, padding_mask, self._forced(inputs, execution, layer))
        terms = balance_terms(routing.scores, routing.experts, padding_mask, config=config)
        flat = x.reshape(-1, x.shape[-1])
        routes = (routing.experts, routing.weights)
        experts, weights = (value.reshape(-1, self.model.top_k) for value in routes)
        # The router may see jittered tokens; the experts get them as they are.
        y, dropped = execution.experts(
            flat, experts, weights, padding_mask.reshape(-1), self.experts.weights()
        )
        y = y.reshape(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        sums = RouterSums(
            balance=self._balance(terms, execution),
            z=z_sum(routing.logits, padding_mask),
            counts=terms.counts.sum(axis=0, dtype=jnp.int32),
            dropped=dropped,
        )
        return y, sums
