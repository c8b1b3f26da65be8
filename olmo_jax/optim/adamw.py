"""AdamW on whatever shard of the main weights this device holds; everything is FP32."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from olmo_jax.config.records import OptimConfig

Moments = dict[str, Any]
"""`mu` and `nu`, shaped like the main weights, and `count`, the steps taken (int32, from 0)."""


def init(main: PyTree[Float[Array, "..."]]) -> Moments:
    """Return the moments before the first step: zeros laid out like `main`."""
    return {
        "mu": jax.tree.map(jnp.zeros_like, main),
        "nu": jax.tree.map(jnp.zeros_like, main),
        "count": jnp.zeros((), jnp.int32),
    }


def update(
    grads: PyTree[Float[Array, "..."]],
    moments: Moments,
    main: PyTree[Float[Array, "..."]],
    *,
    lr: Float[Array, ""],
    optim: OptimConfig,
    decay: PyTree[bool],
) -> tuple[PyTree[Float[Array, "..."]], Moments]:
    """Return main weights and moments after one step; elementwise, so any shard does.

    `m / (sqrt(v) + eps)` of the bias-corrected moments, and `1 - lr * weight_decay` on the weights
    whose `decay` is true.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, with the
    decay scaled by the rate as in olmo_core 3.0.0, optim/adamw.py. To skip a step, keep the old
    weights and moments (`skip.keep`).
    """
    adam = optax.scale_by_adam(b1=optim.betas[0], b2=optim.betas[1], eps=optim.eps)
    direction, state = adam.update(grads, optax.ScaleByAdamState(**moments))
    state = cast(optax.ScaleByAdamState, state)
    shrink = 1.0 - lr * optim.weight_decay

    def move(weight: Array, towards: Array, decays: bool) -> Array:
        return (weight * shrink if decays else weight) - lr * towards

    main = jax.tree.map(move, main, direction, decay)
    return main, {"mu": state.mu, "nu": state.nu, "count": state.count}
