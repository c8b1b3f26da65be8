"""The root-mean-square norm against its formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.arch.parameters import Parameter
from olmo_jax.config.records import ModelConfig
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.norm import RMSNorm, rms_norm

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("num_dims", [1, 2])
def test_norm_divides_by_the_root_mean_square_of_the_last_dims(num_dims):
    x, gain = RNG.normal(size=(2, 3, 4, 5)), RNG.normal(size=(4, 5))
    actual = rms_norm(jnp.float32(x), jnp.float32(gain), eps=0.1, num_dims=num_dims)
    mean_square = np.mean(x**2, axis=(-1, -2)[:num_dims], keepdims=True)
    np.testing.assert_allclose(actual, x / np.sqrt(mean_square + 0.1) * gain, rtol=1e-5)


def test_bfloat16_is_rounded_once_after_the_gain():
    x, gain = jnp.asarray(RNG.normal(size=(64, 16)), jnp.bfloat16), jnp.float32(RNG.normal(size=16))
    actual = rms_norm(x, gain, eps=1e-6)
    expected = rms_norm(x.astype(jnp.float32), gain, eps=1e-6)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected.astype(jnp.bfloat16))


def test_gradient_of_the_gain_is_summed_in_float32():
    num_rows = 16_383  # bfloat16 has no such number
    x, gain = jnp.ones((num_rows, 1), jnp.bfloat16), jnp.ones(1, jnp.float32)
    slope = jax.grad(lambda gain: rms_norm(x, gain, eps=1e-6).sum(dtype=jnp.float32))(gain)
    np.testing.assert_allclose(slope, num_rows, rtol=1e-5)


def test_module_starts_with_gains_of_one():
    gain = Parameter((4, 5), ("heads", "head_dim"), "ones")
    make = Initialiser(jax.random.key(0), ModelConfig(), {"norm.gain": gain})
    norm = RMSNorm(make.inside("norm"), eps=1e-6, num_dims=2)
    x = jnp.asarray(RNG.normal(size=(1, 2, 4, 5)), jnp.float32)
    np.testing.assert_array_equal(norm.gain[...], np.ones((4, 5)))
    np.testing.assert_array_equal(norm(x), rms_norm(x, jnp.ones((4, 5)), eps=1e-6, num_dims=2))
