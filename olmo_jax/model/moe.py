"""The position-wise half of a block: a dense MLP, or routed experts beside a shared one."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.model.balance import BalanceTerms, balance_sum, balance_terms, z_sum
from olmo_jax.model.initialise import Initialiser, Kind
from olmo_jax.model.placement import ExpertWeights, Placement, swiglu
from olmo_jax.model.router import Router, forced_experts, jitter
from olmo_jax.ops.linear import linear


class Surroundings(NamedTuple):
    """What a block reads beside the hidden state; `offsets` count positions from the row start.

    `segment_ids` are those that attention takes: of whole rows.
    """

    positions: Int32[Array, "B L"]
    segment_ids: Int32[Array, "B row"]
    real: Bool[Array, "B L"]
    sequence: Int32[Array, " B"]
    offsets: Int32[Array, " L"]
    step: Int32[Array, ""]


def surroundings(batch: Batch, placement: Placement, step: Int32[Array, ""]) -> Surroundings:
    """Return what the blocks read of a microbatch."""
    return Surroundings(
        batch.positions,
        batch.segment_ids,
        batch.real,
        batch.sequence,
        placement.rows.offsets(batch.positions.shape[1]),
        step,
    )


class RouterSums(NamedTuple):
    """One routed layer's sums over this device's real tokens; counts are taken before any drop."""

    balance: Float32[Array, "*layers"]
    z: Float32[Array, "*layers"]
    counts: Int32[Array, "*layers E"]
    dropped: Int32[Array, "*layers"]


class MLP(nnx.Module):
    """SwiGLU: a dense block's, or the shared expert's.

    Source: olmo_core 3.0.0, nn/moe/v2/shared_experts.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser, hidden: int, name: str):
        self.name = name
        width = model.d_model
        dims = ("d_model", "hidden")
        self.up_gate = make("up_gate", (width, 2 * hidden), dims, "shared", fan_in=width)
        self.down = make("down", (hidden, width), dims[::-1], "shared", fan_in=hidden)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        hidden = checkpoint_name(linear(x, self.up_gate[...]), f"{self.name}_hidden")
        return checkpoint_name(linear(swiglu(hidden), self.down[...]), f"{self.name}_output")


class Experts(nnx.Module):
    """The weights of the routed experts; how rows reach them is the placement's affair.

    Source: olmo_core 3.0.0, nn/moe/v2/routed_experts.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser):
        width, hidden = model.d_model, model.expert_hidden

        def pool(name: str, shape: tuple[int, int], dims: tuple[str, str], kind: Kind):
            shape_of_all, dims_of_all = (model.num_experts, *shape), ("experts", *dims)
            return make(name, shape_of_all, dims_of_all, kind, fan_in=shape[0])

        self.up_gate = pool("up_gate", (width, 2 * hidden), ("d_model", "hidden"), "routed_in")
        self.down = pool("down", (hidden, width), ("hidden", "d_model"), "routed_out")

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
        self.experts = Experts(model, make.inside("experts"))
        shared = model.shared_hidden
        self.shared = MLP(model, make.inside("shared"), shared, "shared") if shared else None

    def _forced(
        self, around: Surroundings, placement: Placement, layer: Array, seed: int
    ) -> Int32[Array, "B L A"] | None:
        assignment = self.model.router.assignment
        if assignment == "learned":
            return None
        return forced_experts(
            assignment,
            seed,
            around.step,
            layer,
            around.sequence,
            around.offsets,
            sequence_length=placement.rows.length(around.positions.shape[1]),
            num_experts=self.model.num_experts,
            top_k=self.model.top_k,
        )

    def _balance(self, terms: BalanceTerms, placement: Placement) -> Float32[Array, ""]:
        add = {
            "instance": placement.over_sequence,
            "microbatch": lambda value: value,
            "global": placement.over_data,
        }[self.model.router.balance_scope]
        sums = (add(terms.counts), add(terms.tokens))
        counts, tokens = (checkpoint_name(value, "balance_counts") for value in sums)
        return balance_sum(terms._replace(counts=counts, tokens=tokens), self.model.top_k)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        around: Surroundings,
        placement: Placement,
        *,
        layer: Int32[Array, ""],
        seed: int,
        training: bool,
    ) -> tuple[Float[Array, "B L D"], RouterSums]:
        config, real = self.model.router, around.real
        seen = x
        if config.jitter_eps is not None and training:
            seen = jitter(
                x, config.jitter_eps, seed, around.step, layer, around.sequence, around.offsets
            )
        routing = self.router(seen, real, self._forced(around, placement, layer, seed))
        terms = balance_terms(routing.scores, routing.experts, real, config=config)
        flat = x.reshape(-1, x.shape[-1])
        routes = (routing.experts, routing.weights)
        experts, weights = (value.reshape(-1, self.model.top_k) for value in routes)
        y, dropped = placement.experts(
            flat, experts, weights, real.reshape(-1), self.experts.weights()
        )
        y = y.reshape(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        sums = RouterSums(
            balance=self._balance(terms, placement),
            z=z_sum(routing.logits, real),
            counts=terms.counts.sum(axis=0, dtype=jnp.int32),
            dropped=dropped,
        )
        return y, sums
