import numpy as np
import pytest

from olmo_jax.data.mixture import Proportions, choose, whole_shares


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1.0], (1,)),
        ([0.7, 0.3], (7, 3)),
        ([2.0, 1.0, 1.0], (2, 1, 1)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([1e-3, 1.0], (1, 1000)),
        ([0.123456789, 1.0], (123456789, 1000000000)),
    ],
)
def test_weights_become_whole_shares_without_rounding(weights, shares):
    assert whole_shares(weights) == shares


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [0.5, 0.3, 0.15, 0.05], [3.0, 1.0, 7.0]])
def test_every_prefix_is_close_to_the_weights_and_every_period_exact(weights):
    shares = whole_shares(weights)
    period = sum(shares)
    sources = np.array([choose(i, shares)[0] for i in range(7 * period)])
    taken = np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0)
    ideal = np.arange(1, len(sources) + 1)[:, None] * np.array(shares) / period
    assert np.abs(taken - ideal).max() < 2
    np.testing.assert_array_equal(taken[period - 1 :: period], ideal[period - 1 :: period])


def test_a_source_gives_its_sequences_in_order_without_a_gap():
    chosen = [Proportions([0.5, 0.3, 0.2])[i] for i in range(1000)]
    for source in range(3):
        numbers = [number for which, number in chosen if which == source]
        assert numbers == list(range(len(numbers)))


def test_any_sequence_is_found_at_once():
    source, number = choose(10**15, (7, 3))
    assert source in (0, 1)
    assert abs(number - 10**15 * (7, 3)[source] // 10) <= 1
