"""One optimizer step, and one evaluation: what every device does inside one `shard_map`.

Gradients stay on the device through all microbatches and are reduced once, to the FP32 shard that
is updated there; the updated weights are gathered once. Control flow never depends on data.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import Config
from olmo_jax.data.batch import Batch
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES
from olmo_jax.model.balance import bias_update
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.objective import Divisors, Sums, batch_sums, count, divide, total
from olmo_jax.model.placement import ExpertWeights, Placement, swiglu
from olmo_jax.model.recompute import keep_all_but_weights
from olmo_jax.model.transformer import Params, routed_rows
from olmo_jax.ops.grouped_matmul import grouped_matmul
from olmo_jax.ops.varying import vary_over
from olmo_jax.optim import adamw, skip
from olmo_jax.optim.clip import clip_coefficient
from olmo_jax.parallel import ddp, expert
from olmo_jax.parallel.distributed_optimizer import gather_to_compute, global_norm, reduce_to_main
from olmo_jax.parallel.sums import max_everywhere, sum_everywhere, sum_over
from olmo_jax.train.state import Layout, State

Metrics = dict[str, Array]

MICROBATCHES = "microbatches"
"""The named scope of the accumulation loop: no weight or gradient is communicated inside."""


def routed_mlp(
    pool: ExpertWeights, rows: Float[Array, "R D"], group_sizes: Int32[Array, " e"]
) -> Float[Array, "R D"]:
    """Pass rows, sorted by expert, through the experts at hand."""
    hidden = swiglu(grouped_matmul(rows, pool.up_gate, group_sizes))
    return grouped_matmul(hidden, pool.down, group_sizes)


def _routed(config: Config, num_ranks: int, *, training: bool) -> Any:
    group: dict[str, Any] = {
        "num_experts": config.model.num_experts,
        "axis": "expert",
        "num_ranks": num_ranks,
    }

    def routed(
        x: Array, experts: Array, weights: Array, real: Array, pool: ExpertWeights
    ) -> tuple[Array, Array]:
        compute = partial(routed_mlp, pool)
        if not training:
            return expert.exchange_in_slices(x, experts, weights, real, compute, **group)
        factor = config.parallel.capacity_factor
        return expert.exchange(x, experts, weights, real, compute, capacity_factor=factor, **group)

    return routed


def _placement(config: Config, sizes: Mapping[str, int], *, training: bool) -> Placement:
    return Placement(
        read=ddp.read if training else lambda unit: jax.tree.map(jnp.float32, unit),
        experts=_routed(config, sizes["expert"], training=training),
        block=keep_all_but_weights if training else lambda function: function,
        over_sequence=partial(sum_over, axes=("sequence",)),
        over_data=partial(sum_over, axes=(*DENSE_DATA_AXES, "sequence")),
    )


def _divisors(batch: Batch) -> tuple[Divisors, Int32[Array, ""]]:
    """Count the global batch once: the only divisors of the step, and its real tokens."""
    counted, real = sum_everywhere(count(batch))
    floats = (jnp.maximum(number, 1).astype(jnp.float32) for number in (counted, real))
    return Divisors(*floats), real


def _accumulate(
    config: Config,
    placement: Placement,
    weights: Params,
    router_bias: Params,
    batch: Batch,
    divisors: Divisors,
    step: Int32[Array, ""],
) -> tuple[Params, Sums]:
    """Return this device's FP32 gradients and sums, added up over the microbatches."""

    def share(sinks: Params, rows: Batch) -> tuple[Float32[Array, ""], Sums]:
        params = {**ddp.pair(weights, sinks), **router_bias}
        sums = batch_sums(config, params, rows, placement, step=step, training=True)
        return total(config, divide(sums, divisors)), sums

    def microbatch(gradients: Params, rows: Batch) -> tuple[Params, Sums]:
        fresh, sums = jax.grad(share, has_aux=True)(ddp.zeros(weights), rows)
        return jax.tree.map(jnp.add, gradients, fresh), sums

    with jax.named_scope(MICROBATCHES):
        gradients, sums = lax.scan(microbatch, ddp.zeros(weights), batch)
    return gradients, jax.tree.map(lambda value: value.sum(axis=0, dtype=value.dtype), sums)


def _router_metrics(config: Config, router: RouterSums | None, real: Array) -> Metrics:
    if router is None:
        return dict.fromkeys(
            ("balance_loss", "router_z_loss", "drop_rate", "max_load"), jnp.zeros(())
        )
    counts = router.counts.astype(jnp.float32)
    routes = jnp.maximum(counts.sum(axis=-1), 1)
    metrics = {
        "balance_loss": router.balance.mean() / real,
        "router_z_loss": router.z.mean() / real,
        "drop_rate": router.dropped.astype(jnp.float32).sum() / routes.sum(),
        "max_load": (counts.max(axis=-1) * counts.shape[-1] / routes).max(),
    }
    if config.train.record_expert_counts:
        metrics["expert_counts"] = router.counts
    return metrics


def _move_router_bias(
    config: Config, router_bias: Params, router: RouterSums | None, good: Bool[Array, ""]
) -> Params:
    """Move each layer's selection bias by the counts of the whole step, if the step is not bad."""
    gamma = config.model.router.bias_gamma
    if gamma is None or router is None:
        return router_bias
    return {
        name: jnp.where(good, bias_update(bias, router.counts[rows], gamma), bias)
        for (name, bias), rows in zip(
            router_bias.items(), routed_rows(config.model, router_bias), strict=True
        )
    }


def train_step(
    layout: Layout,
    state: State,
    batch: Batch,
    lr: Float32[Array, ""],
    stop: Int32[Array, "1"],
) -> tuple[State, Metrics]:
    """Take one optimizer step on this device's part; runs inside `shard_map`.

    A step whose loss or gradient norm is not finite changes nothing but the step count; one that
    the skip rule refuses keeps weights and moments.
    """
    config, placed = layout.config, layout.placed
    divisors, real = _divisors(batch)
    placement = _placement(config, layout.sizes, training=True)
    own = Batch(*(vary_over(value, AXES) for value in batch))
    router_bias = {name: vary_over(bias, AXES) for name, bias in state.router_bias.items()}
    gradients, sums = _accumulate(
        config,
        placement,
        ddp.resident(state.weights),
        router_bias,
        own,
        Divisors(*(vary_over(value, AXES) for value in divisors)),
        vary_over(state.step, AXES),
    )
    gradients = {name: reduce_to_main(leaf, placed[name]) for name, leaf in gradients.items()}
    norm = global_norm(gradients, placed)
    sums = sum_everywhere(sums)
    parts = divide(sums, divisors)
    loss = parts.cross_entropy

    good, take, history = _judge(config, state.history, loss, norm)
    scale = clip_coefficient(norm, config.optim.max_grad_norm)
    gradients = {name: leaf * scale for name, leaf in gradients.items()}
    updated = adamw.update(
        gradients, state.moments, state.main, lr=lr, optim=config.optim, decay=layout.decay
    )
    main, moments = skip.keep(take, updated, (state.main, state.moments))
    new = State(
        weights={
            name: gather_to_compute(leaf, placed[name], layout.dtype) for name, leaf in main.items()
        },
        main=main,
        moments=moments,
        router_bias=_move_router_bias(config, state.router_bias, sums.router, good),
        history=history,
        step=state.step + 1,
    )
    metrics = {
        "loss": loss,
        "z_loss": parts.z,
        "grad_norm": norm,
        "skipped": 1 - take.astype(jnp.int32),
        "tokens": real,
        "stop": max_everywhere(stop[0]),
        **_router_metrics(config, sums.router, divisors.real),
    }
    return new, metrics


def _judge(
    config: Config, history: skip.History, loss: Float32[Array, ""], norm: Float32[Array, ""]
) -> tuple[Bool[Array, ""], Bool[Array, ""], skip.History]:
    """Say whether the step is finite, whether it is taken, and what is remembered of it."""
    good = skip.finite(loss, norm)
    if config.optim.skip_sigma is None:
        return good, good, history
    take, history = skip.judge(history, loss, norm, config.optim.skip_sigma)
    return good, take, history


def evaluation_step(
    layout: Layout, weights: Params, router_bias: Params, batch: Batch
) -> dict[str, Array]:
    """Return the summed cross entropy of the batch and its counted tokens; no drop, no change."""
    config = layout.config
    placement = _placement(config, layout.sizes, training=False)
    params = {name: vary_over(leaf, AXES) for name, leaf in {**weights, **router_bias}.items()}
    own = Batch(*(vary_over(value, AXES) for value in batch))

    def microbatch(_: None, rows: Batch) -> tuple[None, Float32[Array, ""]]:
        step = vary_over(jnp.int32(0), AXES)
        sums = batch_sums(config, params, rows, placement, step=step, training=False)
        return None, sums.cross_entropy

    entropies = lax.scan(microbatch, None, own)[1]
    counted, _ = sum_everywhere(count(batch))
    return {"ce_sum": sum_everywhere(entropies.sum()), "counted": counted}
