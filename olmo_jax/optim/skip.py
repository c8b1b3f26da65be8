"""Steps that are not taken: bad ones (not finite), and outliers against the recent past."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PyTree

History = dict[str, Array]
"""`losses`, `grad_norms` f32[window], newest last; the last `size` (int32) of each are filled."""


def init(window: int) -> History:
    """Return an empty history of up to `window` steps."""
    return {
        "losses": jnp.zeros(window, jnp.float32),
        "grad_norms": jnp.zeros(window, jnp.float32),
        "size": jnp.zeros((), jnp.int32),
    }


def finite(loss: Float[Array, ""], norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Say whether loss and gradient norm are numbers; a step where one is not is bad."""
    return jnp.isfinite(loss) & jnp.isfinite(norm)


def _within(
    past: Float[Array, " window"], size: Int32[Array, ""], value: Float[Array, ""], sigma: float
) -> Bool[Array, ""]:
    """Say whether `value` is within `sigma` sample deviations above the past's mean.

    All is measured from the newest entry, so that a constant past has a deviation of exactly 0.
    """
    filled = jnp.arange(past.shape[0]) >= past.shape[0] - size
    offsets = jnp.where(filled, past - past[-1], 0.0)
    mean = offsets.sum() / jnp.maximum(size, 1)
    squares = jnp.where(filled, (offsets - mean) ** 2, 0.0).sum()
    deviation = jnp.sqrt(squares / jnp.maximum(size - 1, 1))
    return value - past[-1] - mean <= sigma * deviation


def _append(past: Float[Array, " window"], value: Float[Array, ""]) -> Float[Array, " window"]:
    return jnp.concatenate([past[1:], value[None]])


def judge(
    history: History, loss: Float[Array, ""], norm: Float[Array, ""], sigma: float
) -> tuple[Bool[Array, ""], History]:
    """Return whether to take the step, and the history with this step in it.

    Loss and gradient norm (before clipping) must both be within `sigma` deviations of the past, and
    only a rise counts. Until max(2, window // 2) steps are known, this one included, any finite
    step is taken. A refused step enters the history, a bad one does not. One past step has no
    deviation, so with a window under 6 the second step is always refused.

    Source: olmo_core 3.0.0, optim/skip_step_optimizer.py.
    Differs: there a loss that is not finite ends the process.
    """
    size, window = history["size"], history["losses"].shape[0]
    early = size + 1 < max(2, window // 2)
    usual = _within(history["losses"], size, loss, sigma) & _within(
        history["grad_norms"], size, norm, sigma
    )
    good = finite(loss, norm)
    longer = {
        "losses": _append(history["losses"], loss),
        "grad_norms": _append(history["grad_norms"], norm),
        "size": jnp.minimum(size + 1, window),
    }
    return good & (early | (usual & (size > 1))), keep(good, longer, history)


def keep(take: Bool[Array, ""], new: PyTree[Any], old: PyTree[Any]) -> PyTree[Any]:
    """Return `new` where the step is taken and `old` where it is not, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)
