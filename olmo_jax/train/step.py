"""One optimizer step, and one evaluation: what every device does inside one `shard_map`.

What lies between a leaf's `resident` and `main` specs moves here, once: gradients are reduced to
the FP32 shard that this device updates, and the updated weights go back to where they are kept.
What moves in every microbatch does so in `accumulate`. Control flow never depends on data.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from olmo_jax.arch.activations import saved_names
from olmo_jax.config.records import Config
from olmo_jax.data.batch import Batch
from olmo_jax.mesh.axes import AXES, TOKEN_AXES, expert_model_axes
from olmo_jax.mesh.layout import Layout
from olmo_jax.model.balance import bias_update
from olmo_jax.model.execution import (
    WHOLE_ROWS,
    Execution,
    RoutedExperts,
    Rows,
    save_everything,
)
from olmo_jax.model.experts import ExpertWeights, grouped_experts
from olmo_jax.model.moe import RouterSums
from olmo_jax.model.objective import Divisors, count, divide
from olmo_jax.model.rematerialize import save_only
from olmo_jax.model.transformer import Params, routed_rows
from olmo_jax.ops.attention import attention
from olmo_jax.ops.varying import vary_everywhere, vary_over
from olmo_jax.optim import skip
from olmo_jax.optim.clip import clip_coefficient
from olmo_jax.optim.decay import decay_mask
from olmo_jax.optim.optimizer import optimizer, update
from olmo_jax.parallel import context, expert
from olmo_jax.parallel.distributed_optimizer import gather_to_resident, global_norm, reduce_to_main
from olmo_jax.parallel.reductions import max_everywhere, sum_everywhere, sum_over
from olmo_jax.parallel.unshard import unshard
from olmo_jax.train import pipelined
from olmo_jax.train.accumulate import Resident, accumulate, entropy
from olmo_jax.train.state import State, compute_dtype, resident

Metrics = dict[str, Array]


def _routed(layout: Layout, *, training: bool) -> RoutedExperts:
    parallel = layout.config.parallel
    group: dict[str, Any] = {
        "num_experts": layout.model.num_experts,
        "axis": expert_model_axes(fold_sequence=parallel.fold_sequence),
        "num_ranks": layout.num_expert_ranks,
    }

    def routed(
        x: Array, experts: Array, weights: Array, padding_mask: Array, pool: ExpertWeights
    ) -> tuple[Array, Array]:
        routes = (x, experts, weights, padding_mask, partial(grouped_experts, pool))
        if not training:
            return expert.exchange_in_slices(*routes, **group)
        return expert.exchange(*routes, capacity_factor=parallel.capacity_factor, **group)

    return routed


def _rows(layout: Layout) -> Rows:
    """Return how a device holds rows that the `sequence` ranks share."""
    num_ranks = layout.sizes["sequence"]
    if num_ranks == 1:
        return WHOLE_ROWS
    method = layout.config.parallel.context
    attends = {
        "ulysses": partial(context.ulysses, num_ranks=num_ranks, attend=attention),
        "ring": partial(context.ring, num_ranks=num_ranks),
    }
    return Rows(
        attend=attends[method],
        offsets=partial(context.offsets, method, num_ranks),
        length=lambda _: layout.train.sequence_length,
    )


def _execution(layout: Layout, *, training: bool) -> Execution:
    saved = saved_names(layout.config)
    return Execution(
        unshard=unshard,
        experts=_routed(layout, training=training),
        rows=_rows(layout),
        rematerialize=partial(save_only, saved) if training else save_everything,
        over_sequence=partial(sum_over, axes=("sequence",)),
        over_data=partial(sum_over, axes=TOKEN_AXES),
        seed=layout.config.seed,
        training=training,
    )


def _divisors(batch: Batch) -> tuple[Divisors, Int32[Array, ""]]:
    """Count the global batch once: the only divisors of the step, and its tokens."""
    # Of the whole batch, and before its loss: a mean of the devices' means would give a token more
    # weight where a device, or a microbatch, has few.
    numbers = sum_everywhere(count(batch))
    floats = (jnp.maximum(number, 1).astype(jnp.float32) for number in numbers)
    return Divisors(*floats), numbers[1]


def _router_metrics(config: Config, router: RouterSums | None, num_tokens: Array) -> Metrics:
    if router is None:
        return dict.fromkeys(
            ("balance_loss", "router_z_loss", "drop_rate", "max_load"), jnp.zeros(())
        )
    counts = router.counts.astype(jnp.float32)
    routes = jnp.maximum(counts.sum(axis=-1), 1)
    metrics = {
        "balance_loss": router.balance.mean() / num_tokens,
        "router_z_loss": router.z.mean() / num_tokens,
        "drop_rate": router.dropped.astype(jnp.float32).sum() / routes.sum(),
        "max_load": (counts.max(axis=-1) * counts.shape[-1] / routes).max(),
    }
    if config.train.record_expert_counts:
        metrics["expert_counts"] = router.counts
    return metrics


def _move_expert_bias(
    config: Config, expert_bias: Params, router: RouterSums | None, good: Bool[Array, ""]
) -> Params:
    """Move each layer's expert bias by the counts of the whole step, if the step is not bad."""
    gamma = config.model.router.bias_gamma
    if gamma is None or router is None:
        return expert_bias
    return {
        name: jnp.where(good, bias_update(bias, router.counts[rows], gamma), bias)
        for (name, bias), rows in zip(
            expert_bias.items(), routed_rows(config.model, expert_bias), strict=True
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
    the skip rule refuses keeps weights and the optimizer's state.
    """
    config, specs = layout.config, layout.specs
    divisors, num_tokens = _divisors(batch)
    execution = _execution(layout, training=True)
    over_microbatches = accumulate if layout.stages is None else pipelined.accumulate
    gradients, sums = over_microbatches(
        Resident.of(layout, resident(layout, state)),
        execution,
        vary_everywhere(state.expert_bias),
        vary_everywhere(batch),
        vary_everywhere(divisors),
        vary_everywhere(state.step),
    )
    # Once a step, after all microbatches. From here each device has the FP32 shard that it updates,
    # and `global_norm` counts each element once.
    gradients = {name: reduce_to_main(leaf, specs[name]) for name, leaf in gradients.items()}
    norm = global_norm(gradients, specs)
    sums = sum_everywhere(sums)
    parts = divide(sums, divisors)
    loss = parts.cross_entropy

    good, take, history = _judge(config, state.history, loss, norm)
    flags = max_everywhere(_flags(stop, [gradients[name] for name in layout.parameters]))
    scale = clip_coefficient(norm, config.optim.max_grad_norm)
    gradients = {name: leaf * scale for name, leaf in gradients.items()}
    updated = update(
        optimizer(config.optim),
        gradients,
        state.opt_state,
        state.main,
        lr=lr,
        weight_decay=config.optim.weight_decay,
        decay=decay_mask(layout.parameters, config.optim.no_decay),
    )
    # Computed in any case and selected after: a conditional would have the host wait for `take`.
    main, opt_state = skip.keep(take, updated, (state.main, state.opt_state))
    new = State(
        weights=_weights_after(layout, main),
        main=main,
        opt_state=opt_state,
        expert_bias=_move_expert_bias(config, state.expert_bias, sums.router, good),
        history=history,
        step=state.step + 1,
    )
    metrics = {
        "loss": loss,
        "z_loss": parts.z,
        "grad_norm": norm,
        "skipped": 1 - take.astype(jnp.int32),
        "tokens": num_tokens,
        "stop": flags[0],
        "bad_leaves": flags[1:],
        **_router_metrics(config, sums.router, divisors.tokens),
    }
    return new, metrics


def _weights_after(layout: Layout, main: Params) -> Params:
    """Return the compute weights that stay on the device until the next step."""
    if not layout.keeps_weights:
        return {}
    return {
        name: gather_to_resident(leaf, layout.specs[name], compute_dtype(layout))
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
    layout: Layout, weights: Params, expert_bias: Params, batch: Batch
) -> dict[str, Array]:
    """Return the summed cross entropy of the batch and its loss tokens; no drop, no change."""
    execution = _execution(layout, training=False)
    over_microbatches = entropy if layout.stages is None else pipelined.entropy
    summed = over_microbatches(
        Resident.of(layout, weights),
        execution,
        vary_everywhere(expert_bias),
        vary_everywhere(batch),
    )
    loss_tokens, _ = sum_everywhere(count(batch))
    return {"ce_sum": sum_everywhere(summed), "loss_tokens": loss_tokens}
