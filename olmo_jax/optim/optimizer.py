"""The optimizer, on whatever shard of the main weights this device holds; everything is FP32."""

from typing import Any

import jax
import optax
from jaxtyping import Array, Float, PyTree

from olmo_jax.config.records import OptimConfig

Weights = PyTree[Float[Array, "..."]]


def optimizer(optim: OptimConfig) -> optax.GradientTransformation:
    """Return what turns gradients into the direction of a step: here Adam's.

    The direction is `m / (sqrt(v) + eps)` of the bias-corrected moments. Another optimizer is
    another transformation here: specs, checkpoints and the skip rule follow from its state
    (`opt_state`). It must be elementwise, since it sees one shard of each leaf, and must leave
    rate, weight decay and clipping to the step.

    Source: optax, scale_by_adam.
    """
    return optax.scale_by_adam(b1=optim.betas[0], b2=optim.betas[1], eps=optim.eps)


def update(
    transformation: optax.GradientTransformation,
    grads: Weights,
    opt_state: Any,
    main: Weights,
    *,
    lr: Float[Array, ""],
    weight_decay: float,
    decay: PyTree[bool],
) -> tuple[Weights, Any]:
    """Return the main weights and the optimizer's state after one step.

    A weight becomes `w * (1 - lr * weight_decay) - lr * direction` where `decay` is true, and
    `w - lr * direction` elsewhere. To skip a step, keep the old weights and state (`skip.keep`).

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, with the
    decay scaled by the rate as in olmo_core 3.0.0, optim/adamw.py.
    Differs: optax.adamw adds `-lr * (direction + weight_decay * w)` to the weight, which rounds
    otherwise.
    """
    direction, opt_state = transformation.update(grads, opt_state, main)
    shrink = 1.0 - lr * weight_decay

    def move(weight: Array, towards: Array, decays: bool) -> Array:
        return (weight * shrink if decays else weight) - lr * towards

    return jax.tree.map(move, main, direction, decay), opt_state
