"""The router: which experts a token goes to, and how much each of them counts. FP32 throughout."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Int32

from olmo_jax.config.records import ModelConfig, RouterConfig
from olmo_jax.model.initialise import Initialiser
from olmo_jax.ops.hashing import uniform

Forced = Literal["random", "uniform"]

# Keeps the jitter's draws apart from those of random assignment, whose coordinates are the same.
_JITTER_STREAM = 1


class Routing(NamedTuple):
    """Where the tokens go: `weights` combine the outputs of `experts`, A distinct ones a token.

    `scores` are the gating's values over all experts, not normalised: the balance loss reads them,
    the z-loss reads `logits`.
    """

    weights: Float[Array, "B L A"]
    experts: Int32[Array, "B L A"]
    scores: Float[Array, "B L E"]
    logits: Float[Array, "B L E"]


def _logits(
    x: Float[Array, "B L D"], weight: Float[Array, "E D"], bias: Float[Array, "E"] | None
) -> Float[Array, "B L E"]:
    # HIGHEST: the default is TF32 on GPU, whose rounding flips the choice of experts.
    logits = jnp.einsum(
        "bld,ed->ble", x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST
    )
    logits = checkpoint_name(logits, "router_logits")
    return logits if bias is None else logits + bias


def _gate(logits: Float[Array, "B L E"], config: RouterConfig) -> Float[Array, "B L E"]:
    if config.gating == "sigmoid":
        return jax.nn.sigmoid(logits) + config.sigmoid_epsilon
    return jax.nn.softmax(logits, axis=-1)


def _keep_best_groups(
    selection: Float[Array, "B L E"], num_groups: int, top_groups: int
) -> Float[Array, "B L E"]:
    """Put -inf on the experts outside the best groups; a group scores the sum of its best two."""
    grouped = selection.reshape(*selection.shape[:2], num_groups, -1)
    best_two, _ = lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, kept = lax.top_k(best_two.sum(-1), top_groups)
    is_kept = (kept[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(selection.shape)


def _select(
    scores: Float[Array, "B L E"],
    logits: Float[Array, "B L E"],
    score_bias: Float[Array, "E"] | None,
    config: RouterConfig,
    top_k: int,
) -> Int32[Array, "B L A"]:
    """Return the top experts, best first. Nothing differentiates through the choice."""
    selection = logits if config.gating == "topk_softmax" else scores
    if score_bias is not None:
        selection = selection + score_bias
    selection = lax.stop_gradient(selection)
    if config.num_groups is not None and config.top_groups is not None:
        selection = _keep_best_groups(selection, config.num_groups, config.top_groups)
    return lax.top_k(selection, top_k)[1]


def _take(values: Float[Array, "B L E"], experts: Int32[Array, "B L A"]) -> Float[Array, "B L A"]:
    """Return the values at a token's experts: distinct ones, so the gradient adds nothing twice."""
    # Not take_along_axis: this gather promises unique indices, and so does its gradient, a
    # scatter-add. Without the promise XLA:GPU has to put additions in order to be deterministic.
    rows = jnp.arange(values.shape[0])[:, None, None]
    positions = jnp.arange(values.shape[1])[None, :, None]
    return values.at[rows, positions, experts].get(
        unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False
    )


def _rescale(weights: Float[Array, "B L A"], config: RouterConfig) -> Float[Array, "B L A"]:
    """Apply the chain of scales; the order is the reference's and changes the rounding."""
    top_k = weights.shape[-1]
    if config.normalize is not None:
        weights = weights / jnp.linalg.norm(weights, ord=config.normalize, axis=-1, keepdims=True)
    if config.restore_weight_scale:
        weights = weights * top_k
    if config.expert_weight_scale is not None:
        weights = weights * config.expert_weight_scale
    if config.original_top_k is not None:
        weights = weights * math.sqrt(config.original_top_k / top_k)
    return weights


def route(
    x: Float[Array, "B L D"],
    weight: Float[Array, "E D"],
    *,
    bias: Float[Array, "E"] | None,
    score_bias: Float[Array, "E"] | None,
    config: RouterConfig,
    top_k: int,
    selection: Int32[Array, "B L A"] | None = None,
    padding_mask: Bool[Array, "B L"] | None = None,
) -> Routing:
    """Choose each token's experts and their combine weights; `selection` takes the choice away.

    Shapes: padding is read as zeros; its experts mean nothing and reach no loss.
    Source: olmo_core 3.0.0, nn/moe/v2/router.py, MoERouterV2.forward.
    Differs: a forced choice leaves the scores alone, so the weights always come from the router.
    """
    if padding_mask is not None:
        x = jnp.where(padding_mask[..., None], x, 0)
    logits = _logits(x, weight, bias)
    scores = _gate(logits, config)
    experts = selection
    if experts is None:
        experts = _select(scores, logits, score_bias, config, top_k)
    experts = checkpoint_name(experts, "router_choice")
    if config.gating == "topk_softmax":
        weights = jax.nn.softmax(_take(logits, experts), axis=-1)
    else:
        weights = _take(scores, experts)
    weights = checkpoint_name(_rescale(weights, config), "router_weights")
    return Routing(weights, experts, scores, logits)


def forced_experts(
    assignment: Forced,
    seed: Int[Array, ""] | int,
    step: Int[Array, ""] | int,
    layer: Int[Array, ""] | int,
    sequence: Int[Array, "B"],
    positions: Int[Array, "L"],
    *,
    sequence_length: int,
    num_experts: int,
    top_k: int,
) -> Int32[Array, "B L A"]:
    """Return A distinct experts a token that depend on its position in the run and on no weight.

    Shapes: `sequence` numbers the rows of the global batch; `positions` count from the row's start
    (a slice of a row brings its own); `sequence_length` is the whole row's.
    """
    if assignment == "random":
        token = (sequence[:, None, None], positions[None, :, None], jnp.arange(num_experts))
        return lax.top_k(uniform(seed, step, layer, *token), top_k)[1]
    # Token n takes the A experts that follow those of token n - 1, so E tokens use each expert A
    # times. Reduced at each step: a long run's token numbers times A pass 2^31.
    row_start = (sequence % num_experts) * (sequence_length % num_experts)
    token = (row_start[:, None] + positions[None, :]) % num_experts
    return (token[..., None] * top_k + jnp.arange(top_k)) % num_experts


def jitter(
    x: Float[Array, "B L D"],
    eps: float,
    seed: Int[Array, ""] | int,
    step: Int[Array, ""] | int,
    layer: Int[Array, ""] | int,
    sequence: Int[Array, "B"],
    positions: Int[Array, "L"],
) -> Float[Array, "B L D"]:
    """Multiply each feature by a draw from [1 - eps, 1 + eps): what the router sees in training.

    Source: olmo_core 3.0.0, nn/moe/v2/router.py.
    Differs: the draw depends on the token's position in the run, so it is the same on every mesh.
    """
    feature = (sequence[:, None, None], positions[None, :, None], jnp.arange(x.shape[-1]))
    draw = uniform(seed, _JITTER_STREAM, step, layer, *feature)
    return x * (1 - eps + 2 * eps * draw).astype(x.dtype)


class Router(nnx.Module):
    """The leaves of a router, and its forward."""

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.config, self.top_k = model.router, model.top_k
        self.weight = make("weight")
        self.bias = make.optional("bias")
        self.score_bias = make.optional("score_bias")

    def __call__(
        self,
        x: Float[Array, "B L D"],
        padding_mask: Bool[Array, "B L"] | None = None,
        selection: Int32[Array, "B L A"] | None = None,
    ) -> Routing:
        """Route the tokens that are not padding."""
        return route(
            x,
            self.weight[...],
            bias=None if self.bias is None else self.bias[...],
            score_bias=None if self.score_bias is None else self.score_bias[...],
            config=self.config,
            top_k=self.top_k,
            selection=selection,
            padding_mask=padding_mask,
        )
