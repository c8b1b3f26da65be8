"""Weights that stay in place for the whole accumulation window, and their FP32 gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.varying import vary_over


@jax.custom_vjp
def attach(weight: Float[Array, "..."], sink: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Return `weight` typed float32; its FP32 gradient goes to `sink`, whose values are not read.

    The operations of the model cast it back to the compute dtype, which undoes this cast, and
    hand back FP32 weight gradients. A cotangent of a bf16 weight would have to be bf16.
    """
    del sink
    return checkpoint_name(weight.astype(jnp.float32), "weight")


def _attach_forward(
    weight: Float[Array, "..."], sink: Float32[Array, "..."]
) -> tuple[Float32[Array, "..."], None]:
    return attach(weight, sink), None


def _attach_backward(
    _: None, cotangent: Float32[Array, "..."]
) -> tuple[None, Float32[Array, "..."]]:
    return None, cotangent


attach.defvjp(_attach_forward, _attach_backward)


class Resident(NamedTuple):
    """A weight in the compute dtype, and the place that its FP32 gradient goes to."""

    weight: Float[Array, "..."]
    sink: Float32[Array, "..."]


def resident(weights: dict[str, Array]) -> dict[str, Array]:
    """Mark replicated weights as this device's own, so that their gradients stay on the device.

    Without it autodiff inserts the reduction where the weight is used: once a microbatch.
    """
    return {name: vary_over(weight, AXES) for name, weight in weights.items()}


def zeros(weights: dict[str, Array]) -> dict[str, Array]:
    """Return FP32 zeros for each weight: a first accumulator, or sinks.

    As sinks XLA never stores them: nothing reads their values.
    """
    return {
        name: vary_over(jnp.zeros(weight.shape, jnp.float32), AXES)
        for name, weight in weights.items()
    }


def pair(weights: dict[str, Array], sinks: dict[str, Array]) -> dict[str, Resident]:
    """Give each weight its sink."""
    return {name: Resident(weight, sinks[name]) for name, weight in weights.items()}


def read(unit: Any) -> Any:
    """Return a unit's leaves typed float32: weights attached to their sinks, the rest as it is."""
    return jax.tree.map(
        lambda leaf: attach(*leaf) if isinstance(leaf, Resident) else leaf,
        unit,
        is_leaf=lambda leaf: isinstance(leaf, Resident),
    )
