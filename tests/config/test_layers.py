"""Layers stand on the grid in the order in which microbatches pass through them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_jax.config.layers import EMPTY, grid, least_waste
from olmo_jax.parallel.pipeline import stages_of


@given(
    layers=st.integers(1, 70),
    ranks=st.integers(1, 8),
    chunks=st.integers(1, 4),
    period=st.integers(1, 4),
)
def test_every_layer_has_one_place_and_empty_ones_come_last(layers, ranks, chunks, period):
    places = grid(layers, ranks, chunks, period=period)
    stages = stages_of("loop", ranks, chunks)
    order = np.concatenate(
        [
            places.layer[c, r]
            for stage in range(ranks * chunks)
            for r, c in np.argwhere(stages == stage)
        ]
    )
    assert order.tolist() == [*range(layers), *[EMPTY] * places.waste]
    assert places.layer.shape[2] % period == 0
    assert places.waste < ranks * chunks * period


@pytest.mark.parametrize(
    ("layers", "ranks", "num_places", "chunk_counts"),
    [(37, 4, 40, (1, 2, 5)), (45, 8, 48, (1, 2, 3)), (61, 8, 64, (1, 2, 4))],
)
def test_recipes_of_the_report(layers, ranks, num_places, chunk_counts):
    assert grid(layers, ranks, 2).num_places == num_places
    assert least_waste(layers, ranks) == chunk_counts


@given(layers=st.integers(1, 70), ranks=st.integers(1, 8), period=st.integers(1, 3))
def test_no_chunk_count_wastes_less_than_those_with_the_least(layers, ranks, period):
    best = least_waste(layers, ranks, period=period)
    waste = {grid(layers, ranks, chunks, period=period).waste for chunks in best}
    assert len(waste) == 1
    others = [grid(layers, ranks, chunks, period=period).waste for chunks in range(1, layers + 1)]
    assert min(others) == waste.pop()


def test_a_stage_holds_whole_periods_of_the_window_pattern():
    places = grid(16, 2, 2, period=4)
    assert (places.layer % 4).reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * 4
    assert grid(18, 2, 2, period=4).waste == 14
