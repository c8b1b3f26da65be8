"""Root-mean-square norm, computed in FP32 whatever the activations are."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from olmo_jax.model.initialise import Initialiser


def rms_norm(
    x: Float[Array, "..."], gain: Float32[Array, "..."], *, eps: float, num_dims: int = 1
) -> Float[Array, "..."]:
    """Normalise the last `num_dims` dims of `x` together, then multiply by `gain` in FP32.

    Source: olmo_core 3.0.0, nn/layer_norm.py, RMSNorm.
    """
    wide = x.astype(jnp.float32)
    dims = tuple(range(-num_dims, 0))
    mean_square = jnp.mean(jnp.square(wide), axis=dims, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * gain).astype(x.dtype)


class RMSNorm(nnx.Module):
    """The norm and its gain; the last `num_dims` dims are one vector to it."""

    def __init__(self, make: Initialiser, *, eps: float, num_dims: int = 1):
        self.eps = eps
        self.num_dims = num_dims
        self.gain = make("gain")

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return rms_norm(x, self.gain[...], eps=self.eps, num_dims=self.num_dims)


def optional_norm(make: Initialiser, name: str, *, eps: float, num_dims: int = 1) -> RMSNorm | None:
    """Return the norm called `name`, or None if the model has none."""
    if not make.has(name):
        return None
    return RMSNorm(make.inside(name), eps=eps, num_dims=num_dims)
