"""Leaves in blocks, and the skip rule's history in another window."""

import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.checkpoint.leaves import blocks, resized


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (4, 1, 3), (2, 3, 4, 5), (0, 3)])
@pytest.mark.parametrize("num_elements", [1, 7, 30, 1000])
def test_blocks_cover_a_leaf_once(shape, num_elements) -> None:
    times = np.zeros(shape, int)
    for block in blocks(shape, num_elements):
        assert times[block].size <= num_elements
        times[block] += 1
    assert (times == 1).all()


@pytest.mark.parametrize(
    ("window", "kept", "size"), [(2, [4, 5], 2), (4, [0, 3, 4, 5], 3), (6, [0, 0, 0, 3, 4, 5], 3)]
)
def test_the_newest_steps_stay_in_another_window(window, kept, size) -> None:
    past = jnp.array([0.0, 3, 4, 5])
    found = resized({"losses": past, "grad_norms": past * 2, "size": jnp.int32(3)}, window)
    np.testing.assert_array_equal(found["losses"], np.array(kept, np.float32))
    np.testing.assert_array_equal(found["grad_norms"], 2 * np.array(kept, np.float32))
    assert (found["size"], found["size"].dtype) == (size, jnp.int32)
