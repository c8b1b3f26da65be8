"""The product with a weight: plain in value, FP32 in the weight's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.ops.linear import linear


def _arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("equation", "x_shape", "w_shape", "num_contracting"),
    [
        ("blnh,nhd->bld", (2, 3, 4, 5), (4, 5, 6), 2),
        ("bld,dnh->blnh", (2, 3, 6), (6, 4, 5), 1),
        ("d,df->f", (6,), (6, 4), 1),
    ],
)
def test_linear_and_both_gradients_are_those_of_einsum(equation, x_shape, w_shape, num_contracting):
    x, w = _arrays(x_shape, w_shape)
    expected, expected_pull = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), x, w)
    actual, pull = jax.vjp(lambda x, w: linear(x, w, num_contracting), x, w)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for ours, theirs in zip(pull(expected), expected_pull(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_weight_gradient_of_bfloat16_activations_is_summed_in_float32():
    num_rows = 16_383  # bfloat16 has no such number
    x = jnp.ones((num_rows, 1), jnp.bfloat16)
    w = jnp.ones((1, 1), jnp.float32)
    y, pull = jax.vjp(linear, x, w)
    dx, dw = pull(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert dw.item() == num_rows
