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
    # JAX gives a cotangent the dtype of its primal. That of a bf16 weight would be bf16, and every
    # addend of a sum over microbatches would be rounded. So the model sees a float32 array:
    #
    #     forward     bf16 weight -> float32 (here) -> bf16 (in the op)   exact: XLA cancels both
    #     backward    float32 gradient of the op -> accumulator           no rounding on the way
    #
    # The gradient is taken of the accumulator alone: zeros that the forward does not read.
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
