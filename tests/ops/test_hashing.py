import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.ops.hashing import bits, mix, uniform

GRID = (jnp.arange(300)[:, None], jnp.arange(400))  # two coordinates, 120,000 values


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 5])
def test_values_are_uniform(seed):
    values = np.asarray(uniform(seed, *GRID), np.float64)
    assert values.shape == (300, 400)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    # Five standard errors of the mean and of the variance of 120,000 uniform values.
    assert abs(values.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / values.size)
    assert abs(values.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / values.size)
    counts = np.histogram(values, 64, (0, 1))[0]
    # chi-squared of 63 degrees of freedom: mean 63, standard deviation 11.
    assert np.sum((counts - counts.mean()) ** 2) / counts.mean() < 63 + 5 * 11.3


@pytest.mark.parametrize("dim", [0, 1])
def test_neighbours_are_not_correlated(dim):
    values = np.asarray(uniform(3, *GRID), np.float64) - 0.5
    neighbour = np.roll(values, 1, axis=dim)
    assert abs(np.mean(values * neighbour) * 12) < 5 / np.sqrt(values.size)


def test_seeds_and_coordinates_all_count():
    base = np.asarray(bits(0, *GRID))
    for other in (bits(1, *GRID), bits(0, *GRID, 0), bits(0, GRID[1][:300, None], 7 + GRID[1])):
        assert np.mean(base == np.asarray(other)) < 1e-3
    transposed = np.asarray(bits(0, *GRID)[:, :300]).T
    assert np.mean(base[:, :300] == transposed) < 2 / 300  # the diagonal is its own transpose


def test_a_coordinate_equal_to_the_seed_is_no_special_case():
    values = [int(bits(seed, jnp.int32(seed))) for seed in range(200)]
    assert len(set(values)) == 200


def test_each_input_bit_flips_each_output_bit_half_of_the_time():
    x = jnp.arange(4096, dtype=jnp.uint32) * jnp.uint32(2654435761)
    for bit in range(32):
        changed = np.asarray(mix(x) ^ mix(x ^ jnp.uint32(1 << bit)))
        shares = [np.mean((changed >> out) & 1) for out in range(32)]
        assert np.all(np.abs(np.array(shares) - 0.5) < 0.1)


def test_values_are_the_same_compiled_and_on_any_mesh():
    alone = np.asarray(uniform(7, jnp.arange(64), 5))
    mesh, spec = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")
    sharded = jax.shard_map(lambda i: uniform(7, i, 5), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(sharded)(jnp.arange(64)), alone)
    traced_seed = jax.jit(lambda seed: uniform(seed, jnp.arange(64), 5))(jnp.int32(7))
    np.testing.assert_array_equal(traced_seed, alone)


def test_the_stream_stays_what_it_was():
    # A changed constant would change the routes of every recorded run.
    stream = [int(bits(0)), int(bits(0, 1)), int(bits(1, 2, 3))]
    assert stream == [1214650568, 2787967608, 3474144107]
