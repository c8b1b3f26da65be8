"""Rotary positions: the rules of context extension, and what turning does to scores."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.config.records import RopeConfig
from olmo_jax.model.rope import (
    attention_factor,
    inverse_frequencies,
    is_rotated,
    is_scaled,
    rotate,
)

RNG = np.random.default_rng(0)


def _plain(theta, num_dims):
    return np.array([theta ** (-2 * i / num_dims) for i in range(num_dims // 2)])


def _llama3(theta, num_dims, *, factor, length, low, high):
    """Write out the rule by wavelength, one dim at a time."""
    result = []
    for frequency in _plain(theta, num_dims):
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            result.append(frequency)
        elif wavelength > length / low:
            result.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(result)


def _yarn(theta, num_dims, *, factor, length, fast, slow):
    def dim(rotations):
        return num_dims * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(dim(fast)), 0)
    high = min(math.ceil(dim(slow)), num_dims // 2 - 1)
    result = []
    for i, frequency in enumerate(_plain(theta, num_dims)):
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        result.append(frequency / factor * ramp + frequency * (1 - ramp))
    return np.array(result)


def test_plain_frequencies_fall_geometrically_from_one():
    rope = RopeConfig(theta=1e4)
    expected = 1e4 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(inverse_frequencies(rope, 8, scaled=False), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(scaling="abf", scaled_theta=8e6), _plain(8e6, 64)),
        (RopeConfig(scaling="pi", factor=4.0), _plain(5e5, 64) / 4.0),
        (
            RopeConfig(scaling="stepwise"),
            _llama3(5e5, 64, factor=32.0, length=8192, low=1.0, high=4.0),
        ),
        (
            RopeConfig(
                scaling="stepwise",
                theta=1e4,
                factor=8.0,
                original_length=100,
                low_frequency_factor=2.0,
                high_frequency_factor=3.0,
            ),
            _llama3(1e4, 64, factor=8.0, length=100, low=2.0, high=3.0),
        ),
        (
            RopeConfig(scaling="yarn", factor=8.0),
            _yarn(5e5, 64, factor=8.0, length=8192, fast=32.0, slow=1.0),
        ),
    ],
)
def test_scaled_frequencies_follow_the_rule(rope, expected):
    assert not np.allclose(inverse_frequencies(rope, 64, scaled=False), expected)
    np.testing.assert_allclose(inverse_frequencies(rope, 64, scaled=True), expected, rtol=2e-7)


@pytest.mark.parametrize("periods", [1.0, 4.0])
def test_stepwise_joins_its_pieces_at_both_thresholds(periods):
    """The wavelength of the last dim is put on the threshold: `periods` of them fill the length."""
    length = 1024
    frequency = 2 * math.pi * periods / length
    rope = RopeConfig(theta=frequency**-2.0, scaling="stepwise", factor=8.0, original_length=length)
    expected = frequency / 8.0 if periods == 1.0 else frequency
    np.testing.assert_allclose(inverse_frequencies(rope, 4, scaled=True)[1], expected, rtol=1e-6)


def test_yarn_keeps_its_ramp_inside_the_rotated_pairs():
    """Here the ramp would end at pair 9 of 8: it ends at the last pair, which is divided whole."""
    rope = RopeConfig(theta=1e4, scaling="yarn", factor=4.0, original_length=131_072)
    actual = inverse_frequencies(rope, 16, scaled=True)
    # 32 rotations fit from pair 5 on, so pair 6 is half-way to the last one.
    plain = _plain(1e4, 16)
    np.testing.assert_allclose(actual[:6], plain[:6], rtol=1e-6)
    np.testing.assert_allclose(actual[6:], plain[6:] * [(1 + 1 / 4) / 2, 1 / 4], rtol=1e-6)


def test_yarn_alone_rescales_the_logits():
    yarn = RopeConfig(scaling="yarn", factor=8.0)
    assert attention_factor(yarn, scaled=True) == pytest.approx(0.1 * math.log(8.0) + 1.0)
    assert attention_factor(yarn, scaled=False) == 1.0
    assert attention_factor(RopeConfig(scaling="pi"), scaled=True) == 1.0
    x = jnp.asarray(RNG.normal(size=(1, 3, 2, 8)), jnp.float32)
    inverse = inverse_frequencies(yarn, 8, scaled=True)
    positions = jnp.arange(3)[None]
    expected = 1.25 * rotate(x, positions, inverse)
    np.testing.assert_allclose(rotate(x, positions, inverse, factor=1.25), expected, rtol=1e-5)


def test_scaling_and_rotation_depend_on_the_window_of_the_layer():
    assert (is_scaled(RopeConfig(), None), is_scaled(RopeConfig(), 4)) == (True, False)
    everywhere = RopeConfig(scaled_layers="all")
    assert (is_scaled(everywhere, None), is_scaled(everywhere, 4)) == (True, True)
    assert (is_rotated(RopeConfig(), None), is_rotated(RopeConfig(), 4)) == (True, True)
    local = RopeConfig(on_full_attention=False)
    assert (is_rotated(local, None), is_rotated(local, 4)) == (False, True)


def test_pairs_are_halves_and_turn_as_complex_numbers():
    x, positions = RNG.normal(size=(2, 5, 3, 8)), np.array([[0, 1, 2, 0, 1], [5, 6, 7, 8, 9]])
    inverse = inverse_frequencies(RopeConfig(theta=100.0), 8, scaled=False)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * inverse)
    actual = rotate(jnp.float32(x), jnp.asarray(positions), inverse)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_partial_rotation_leaves_the_trailing_dims_alone():
    rope = RopeConfig(partial=0.5)
    inverse = inverse_frequencies(rope, 16, scaled=False)
    assert inverse.shape == (4,)
    x, positions = jnp.asarray(RNG.normal(size=(1, 4, 2, 16)), jnp.float32), jnp.arange(4)[None]
    actual = rotate(x, positions, inverse)
    np.testing.assert_array_equal(actual[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(actual[..., :8], rotate(x[..., :8], positions, inverse))


def test_scores_depend_on_distance_alone():
    """So positions that restart at a document give the scores of positions that run on."""
    q, k = (jnp.asarray(RNG.normal(size=(1, 6, 2, 8)), jnp.float32) for _ in range(2))
    inverse = inverse_frequencies(RopeConfig(theta=1e4), 8, scaled=False)

    def scores(first):
        positions = first + jnp.arange(6)[None]
        turned = rotate(q, positions, inverse), rotate(k, positions, inverse)
        return jnp.einsum("blnh,bmnh->bnlm", *turned)

    np.testing.assert_allclose(scores(0), scores(37), atol=2e-5)


def test_low_precision_rounds_the_table_and_full_precision_the_result():
    x = jnp.asarray(RNG.normal(size=(1, 32, 2, 8)), jnp.bfloat16)
    positions = jnp.arange(32)[None]
    inverse = inverse_frequencies(RopeConfig(), 8, scaled=False)
    exact = rotate(x.astype(jnp.float32), positions, inverse)
    full = rotate(x, positions, inverse)
    low = rotate(x, positions, inverse, full_precision=False)
    assert full.dtype == low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(full, exact.astype(jnp.bfloat16))
    error = np.abs(np.asarray(low, np.float32) - exact).max()
    assert np.abs(np.asarray(full, np.float32) - exact).max() < error < 0.05
