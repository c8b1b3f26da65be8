"""Clipping by the global norm."""

import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.optim.clip import clip_coefficient


def norm(*parts):
    return jnp.sqrt(sum(jnp.vdot(part, part) for part in map(jnp.array, parts)))


def test_a_gradient_of_length_5_is_clipped_to_length_1():
    gradient = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(gradient * clip_coefficient(norm(gradient), 1.0), [0.6, 0.8], 4e-7)


def test_all_leaves_are_scaled_by_one_factor_of_the_global_norm():
    total = norm([3.0, 4.0], [0.5])
    assert total == pytest.approx(np.sqrt(25.25), rel=1e-7)
    assert clip_coefficient(total, 1.0) == pytest.approx(1 / (np.sqrt(25.25) + 1e-6), rel=1e-6)


@pytest.mark.parametrize("max_norm", [5.1, None])
def test_a_short_gradient_and_a_run_without_clipping_are_left_alone(max_norm):
    assert clip_coefficient(jnp.float32(5.0), max_norm) == 1.0


def test_a_gradient_of_zero_is_left_alone():
    assert clip_coefficient(jnp.float32(0.0), 1.0) == 1.0
