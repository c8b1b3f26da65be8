"""Weights that do not move for the whole accumulation window, and their FP32 gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


@jax.custom_vjp
def attach(
    weight: Float[Array, "..."], accumulator: Float32[Array, "..."]
) -> Float32[Array, "..."]:
    """Return `weight` typed float32; its FP32 gradient goes to `accumulator`.

    The operations of the model cast it back to the compute dtype, which undoes this cast, and
    hand back FP32 weight gradients. A cotangent of a bf16 weight would have to be bf16.
    """
    del accumulator
    return weight.astype(jnp.float32)


def _attach_forward(
    weight: Float[Array, "..."], accumulator: Float32[Array, "..."]
) -> tuple[Float32[Array, "..."], None]:
    return attach(weight, accumulator), None


def _attach_backward(
    _: None, cotangent: Float32[Array, "..."]
) -> tuple[None, Float32[Array, "..."]]:
    return None, cotangent


attach.defvjp(_attach_forward, _attach_backward)
