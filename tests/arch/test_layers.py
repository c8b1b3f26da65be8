"""Stages hold the layers in the order in which microbatches pass through them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_jax.arch.layers import PADDING_LAYER, least_padding, stage_layout
from olmo_jax.parallel.pipeline import stages_of


@given(
    layers=st.integers(1, 70),
    ranks=st.integers(1, 8),
    chunks=st.integers(1, 4),
    period=st.integers(1, 4),
)
def test_every_layer_is_in_one_stage_and_padding_comes_last(layers, ranks, chunks, period):
    found = stage_layout(layers, ranks, chunks, period=period)
    stages = stages_of(ranks, chunks)
    order = np.concatenate(
        [
            found.layers[c, r]
            for stage in range(ranks * chunks)
            for r, c in np.argwhere(stages == stage)
        ]
    )
    assert order.tolist() == [*range(layers), *[PADDING_LAYER] * found.num_padding]
    assert found.layers.shape[2] % period == 0
    assert found.num_padding < ranks * chunks * period


@pytest.mark.parametrize(
    ("layers", "ranks", "num_positions", "chunk_counts"),
    [(37, 4, 40, (1, 2, 5)), (45, 8, 48, (1, 2, 3)), (61, 8, 64, (1, 2, 4))],
)
def test_recipes_of_the_report(layers, ranks, num_positions, chunk_counts):
    assert stage_layout(layers, ranks, 2).num_positions == num_positions
    assert least_padding(layers, ranks) == chunk_counts


@given(layers=st.integers(1, 70), ranks=st.integers(1, 8), period=st.integers(1, 3))
def test_no_chunk_count_needs_less_padding_than_those_with_the_least(layers, ranks, period):
    best = least_padding(layers, ranks, period=period)
    padding = {stage_layout(layers, ranks, chunks, period=period).num_padding for chunks in best}
    assert len(padding) == 1
    others = [
        stage_layout(layers, ranks, chunks, period=period).num_padding
        for chunks in range(1, layers + 1)
    ]
    assert min(others) == padding.pop()


def test_a_stage_holds_whole_periods_of_the_window_pattern():
    found = stage_layout(16, 2, 2, period=4)
    assert (found.layers % 4).reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * 4
    assert stage_layout(18, 2, 2, period=4).num_padding == 14
