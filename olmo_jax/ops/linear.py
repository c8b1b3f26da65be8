"""The product with a weight, whose gradient is FP32 from its first addend."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

Residuals = tuple[Array, Array]


def _product(
    x: Array, weight: Array, dims: tuple[tuple[int, ...], tuple[int, ...]], dtype: jnp.dtype
) -> Array:
    return lax.dot_general(x, weight, (dims, ((), ())), preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: Array, w: Array, num_contracting: int) -> Array:
    return _forward(x, w, num_contracting)[0]


def _forward(x: Array, w: Array, num_contracting: int) -> tuple[Array, Residuals]:
    # w is a bf16 weight typed float32 (`parallel.ddp.attach`): this cast undoes that one.
    weight = w.astype(x.dtype)
    last = tuple(range(x.ndim - num_contracting, x.ndim))
    y = _product(x, weight, (last, tuple(range(num_contracting))), x.dtype)
    return y, (x, weight)


def _backward(num_contracting: int, residuals: Residuals, dy: Array) -> tuple[Array, Array]:
    x, weight = residuals
    num_rows = x.ndim - num_contracting
    last_of_dy = tuple(range(num_rows, dy.ndim))
    last_of_weight = tuple(range(num_contracting, weight.ndim))
    dx = _product(dy, weight, (last_of_dy, last_of_weight), x.dtype)
    # FP32 out of the product, not a cast of its bf16 result: the addends are never rounded.
    rows = tuple(range(num_rows))
    return dx, _product(x, dy, (rows, rows), jnp.dtype(jnp.float32))


_linear.defvjp(_forward, _backward)


def linear(
    x: Float[Array, "..."], w: Float32[Array, "..."], num_contracting: int = 1
) -> Float[Array, "..."]:
    """Contract the last `num_contracting` dims of `x` with the first of `w`, in `x.dtype`.

    Shapes: x [..., *in], w [*in, *out], result [..., *out]; the cotangent of `w` is float32.
    """
    return _linear(x, w, num_contracting)
