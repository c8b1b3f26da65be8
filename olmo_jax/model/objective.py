"""What is trained: cross entropy, its z-loss and the router losses, over global counts."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from olmo_jax.arch.labels import IGNORED
from olmo_jax.config.records import Config, ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.model.execution import Execution, Tree, one_device
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.transformer import (
    Params,
    by_period,
    check_leaves,
    forward,
    forward_pass,
    head_input,
    head_units,
)
from olmo_jax.ops.cross_entropy import cross_entropy


class LossSums(NamedTuple):
    """Sums over one device's tokens of one microbatch: nothing is divided yet."""

    cross_entropy: Float32[Array, ""]
    z: Float32[Array, ""]
    router: RouterSums | None


class Divisors(NamedTuple):
    """Of the global batch: tokens in the loss mask, and tokens that are not padding."""

    loss_tokens: Float32[Array, ""]
    tokens: Float32[Array, ""]


class LossParts(NamedTuple):
    """Unweighted losses: the first two per token of the loss mask, the router's per token,
    summed over routed layers.
    """

    cross_entropy: Float32[Array, ""]
    z: Float32[Array, ""]
    balance: Float32[Array, ""]
    router_z: Float32[Array, ""]


def masked_labels(batch: Batch) -> Array:
    """Return the labels, -100 also where a position is padding."""
    return jnp.where(batch.padding_mask, batch.labels, IGNORED)


def count(batch: Batch) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Return how many positions are in the loss mask, and how many are not padding."""
    loss_tokens = (masked_labels(batch) != IGNORED).sum(dtype=jnp.int32)
    return loss_tokens, jnp.asarray(batch.padding_mask).sum(dtype=jnp.int32)


def batch_sums(
    config: Config,
    params: dict[str, Any],
    batch: Batch,
    execution: Execution,
    step: Int32[Array, ""],
) -> LossSums:
    """Run the model on one microbatch; `params` are as `forward` takes them."""
    run = forward_pass(config.model, batch, execution, step)
    hidden, router = forward(run, params, batch.tokens)
    entropy, z = head_losses(config, params, hidden, masked_labels(batch), execution)
    return LossSums(entropy, z, router)


def head_losses(
    config: Config,
    params: dict[str, Any],
    hidden: Float[Array, "B L D"],
    labels: Int32[Array, "B L"],
    execution: Execution,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Return the sums of cross entropy and z-loss over the labels that are not -100."""
    head = execution.rematerialize(partial(_head_sums, config, execution))
    return head(head_units(config.model, params), hidden, labels)


def _head_sums(
    config: Config,
    execution: Execution,
    units: tuple[Tree, ...],
    hidden: Float[Array, "B L D"],
    labels: Int32[Array, "B L"],
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    normed, weight = head_input(config.model, units, hidden, execution)
    return cross_entropy(
        normed.reshape(-1, config.model.d_model),
        weight,
        labels.reshape(-1),
        chunk_tokens=config.train.head_chunk_tokens,
    )


def divide(sums: LossSums, divisors: Divisors) -> LossParts:
    """Return the losses of these sums' tokens as their share of the global batch's."""
    zero = jnp.zeros((), jnp.float32)
    router = sums.router
    return LossParts(
        sums.cross_entropy / divisors.loss_tokens,
        sums.z / divisors.loss_tokens,
        zero if router is None else router.balance.sum() / divisors.tokens,
        zero if router is None else router.z.sum() / divisors.tokens,
    )


def total(config: Config, parts: LossParts) -> Float32[Array, ""]:
    """Return the scalar that is differentiated."""
    router = config.model.router
    return (
        parts.cross_entropy
        + config.train.z_loss_weight * parts.z
        + router.balance_weight * parts.balance
        + router.z_weight * parts.router_z
    )


def objective(
    config: Config, params: Params, batch: Batch, *, step: int = 0
) -> tuple[Float32[Array, ""], LossParts]:
    """Return the training objective of a whole batch and its parts: one device, FP32, no drop.

    The oracle of every parallel method. Expert biases are leaves of `params`, without gradient.
    `step` is the number of optimizer steps before this one; it only draws forced routes and jitter.
    """
    check_leaves(config.model, params)
    batch = Batch(*map(jnp.asarray, batch))
    stored = by_period(config.model, params)
    execution = one_device(seed=config.seed, training=True)
    sums = batch_sums(_exact(config), stored, batch, execution, jnp.int32(step))
    divisors = Divisors(*(jnp.maximum(number, 1).astype(jnp.float32) for number in count(batch)))
    parts = divide(sums, divisors)
    return total(config, parts), parts


def _exact(config: Config) -> Config:
    model = config.model.model_copy(update={"dtype": "float32"})
    return config.model_copy(update={"model": model})


def _plain_batch(
    tokens: Int[Array, "B L"], labels: Int[Array, "B L"], segment_ids: Int[Array, "B L"] | None
) -> Batch:
    tokens = jnp.asarray(tokens, jnp.int32)
    rows, length = tokens.shape
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    segments = jnp.asarray(segment_ids, jnp.int32)
    #     segment    1 1 1 2 2 3
    #     begins     1 0 0 1 0 1
    #     start      0 0 0 3 3 5     running maximum of the offsets where one begins
    #     position   0 1 2 0 1 0     offset - start
    offsets = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    begins = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start = jnp.maximum.accumulate(jnp.where(begins, offsets, 0), axis=1)
    return Batch(
        tokens=tokens,
        labels=jnp.asarray(labels, jnp.int32),
        segment_ids=segments,
        positions=offsets - start,
        padding_mask=jnp.ones(tokens.shape, bool),
        sequence=jnp.arange(rows, dtype=jnp.int32),
    )


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
) -> Float32[Array, "B L V"]:
    """Return FP32 logits: one device, no drop. Attention stays inside a segment."""
    check_leaves(config, params)
    batch = _plain_batch(tokens, jnp.full(tokens.shape, IGNORED), segment_ids)
    exact = config.model_copy(update={"dtype": "float32"})
    stored, execution = by_period(exact, params), one_device()
    run = forward_pass(exact, batch, execution, jnp.int32(0))
    hidden, _ = forward(run, stored, batch.tokens)
    normed, weight = head_input(exact, head_units(exact, stored), hidden, execution)
    return jnp.matmul(normed, weight)


def loss(
    config: ModelConfig, params: Params, tokens: Int[Array, "B L"], labels: Int[Array, "B L"]
) -> Float32[Array, ""]:
    """Return the mean cross entropy over labels that are not -100: one device, FP32, no drop."""
    check_leaves(config, params)
    batch = _plain_batch(tokens, labels, None)
    whole = _exact(Config(model=config))
    stored = by_period(config, params)
    sums = batch_sums(whole, stored, batch, one_device(), jnp.int32(0))
    return sums.cross_entropy / jnp.maximum(count(batch)[0], 1)
