"""One optimizer step, and one evaluation: what every device does inside one `shard_map`.

What lies between a leaf's `resident` and `main` specs moves here, once: gradients are reduced to
the FP32 shard that this device updates, and the updated weights go back to where they are kept.
What moves in every microbatch does so in `accumulate`. Control flow never depends on data.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.config.records import Config
from olmo_jax.config.residuals import kept
from olmo_jax.data.batch import Batch
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES, expert_model_axes, num_expert_ranks
from olmo_jax.model.balance import bias_update
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.objective import Divisors, count, divide
from olmo_jax.model.placement import (
    WHOLE_ROWS,
    ExpertWeights,
    Placement,
    Rows,
    keep_everything,
    swiglu,
)
from olmo_jax.model.recompute import keep_only
from olmo_jax.model.transformer import Params, routed_rows
from olmo_jax.ops.attention import attention
from olmo_jax.ops.grouped_matmul import grouped_matmul
from olmo_jax.ops.varying import vary_over
from olmo_jax.optim import adamw, skip
from olmo_jax.optim.clip import clip_coefficient
from olmo_jax.parallel import context, expert, units
from olmo_jax.parallel.distributed_optimizer import gather_to_resident, global_norm, reduce_to_main
from olmo_jax.parallel.sums import max_everywhere, sum_everywhere, sum_over
from olmo_jax.train import pipelined
from olmo_jax.train.accumulate import Resident, accumulate, entropy
from olmo_jax.train.state import Layout, State

Metrics = dict[str, Array]


def routed_mlp(
    pool: ExpertWeights, rows: Float[Array, "R D"], group_sizes: Int32[Array, " e"]
) -> Float[Array, "R D"]:
    """Pass rows, sorted by expert, through the experts at hand."""
    hidden = checkpoint_name(grouped_matmul(rows, pool.up_gate, group_sizes), "expert_hidden")
    output = grouped_matmul(swiglu(hidden), pool.down, group_sizes)
    return checkpoint_name(output, "expert_output")


def _routed(config: Config, sizes: Mapping[str, int], *, training: bool) -> Any:
    fold = config.parallel.fold_sequence
    group: dict[str, Any] = {
        "num_experts": config.model.num_experts,
        "axis": expert_model_axes(fold_sequence=fold),
        "num_ranks": num_expert_ranks(sizes, fold_sequence=fold),
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


def _rows(config: Config, num_ranks: int) -> Rows:
    """Return how a device holds rows that `num_ranks` share."""
    if num_ranks == 1:
        return WHOLE_ROWS
    method = config.parallel.context
    attends = {
        "ulysses": partial(context.ulysses, num_ranks=num_ranks, attend=attention),
        "ring": partial(context.ring, num_ranks=num_ranks),
    }
    return Rows(
        attend=attends[method],
        offsets=partial(context.offsets, method, num_ranks),
        length=lambda _: config.train.sequence_length,
    )


def _placement(config: Config, sizes: Mapping[str, int], *, training: bool) -> Placement:
    return Placement(
        read=units.read,
        experts=_routed(config, sizes, training=training),
        rows=_rows(config, sizes["sequence"]),
        recomputed=partial(keep_only, kept(config)) if training else keep_everything,
        over_sequence=partial(sum_over, axes=("sequence",)),
        over_data=partial(sum_over, axes=(*DENSE_DATA_AXES, "sequence")),
    )


def _divisors(batch: Batch) -> tuple[Divisors, Int32[Array, ""]]:
    """Count the global batch once: the only divisors of the step, and its real tokens."""
    counted, real = sum_everywhere(count(batch))
    floats = (jnp.maximum(number, 1).astype(jnp.float32) for number in (counted, real))
    return Divisors(*floats), real


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
    over_microbatches = accumulate if layout.body is None else pipelined.accumulate
    gradients, sums = over_microbatches(
        Resident.of(layout, layout.resident(state)),
        placement,
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
    flags = max_everywhere(_flags(stop, [gradients[name] for name in layout.shapes[0]]))
    scale = clip_coefficient(norm, config.optim.max_grad_norm)
    gradients = {name: leaf * scale for name, leaf in gradients.items()}
    updated = adamw.update(
        gradients, state.moments, state.main, lr=lr, optim=config.optim, decay=layout.decay
    )
    main, moments = skip.keep(take, updated, (state.main, state.moments))
    new = State(
        weights=_weights_after(layout, main),
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
        "stop": flags[0],
        "bad_leaves": flags[1:],
        **_router_metrics(config, sums.router, divisors.real),
    }
    return new, metrics


def _weights_after(layout: Layout, main: Params) -> Params:
    """Return the compute weights that stay on the device until the next step."""
    if not layout.keeps_weights:
        return {}
    return {
        name: gather_to_resident(leaf, layout.placed[name], layout.dtype)
        for name, leaf in main.items()
    }


def _flags(stop: Int32[Array, "1"], gradients: list[Array]) -> Int32[Array, " flags"]:
    """Return this device's stop flag and whether each gradient is not finite: one reduction."""
    bad = [jnp.any(~jnp.isfinite(leaf)).astype(jnp.int32) for leaf in gradients]
    return jnp.stack([vary_over(flag, AXES) for flag in (stop[0], *bad)])


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
    resident = Resident.of(layout, weights)
    own = Batch(*(vary_over(value, AXES) for value in batch))
    over_microbatches = entropy if layout.body is None else pipelined.entropy
    summed = over_microbatches(resident, placement, units.own(router_bias), own)
    counted, _ = sum_everywhere(count(batch))
    return {"ce_sum": sum_everywhere(summed), "counted": counted}
