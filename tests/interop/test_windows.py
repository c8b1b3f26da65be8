"""A list of windows, one a layer, becomes a pattern that gives the same list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_jax.config.records import ModelConfig, WindowConfig
from olmo_jax.interop.windows import pattern_of, windows_of


def _listed(windows, num_layers):
    return windows_of(ModelConfig(num_layers=num_layers, windows=windows))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=9))
def test_any_list_comes_back_layer_by_layer(windows):
    assert _listed(pattern_of(windows), len(windows)) == windows


@pytest.mark.parametrize(
    ("windows", "pattern", "first", "last"),
    [
        ([8, None, 8, None], (8, -1), False, False),
        ([8, None, 8, None, None], (8, -1), False, True),
        ([None, 4, 4, 4, None, 4, 4, 4, None, None], (-1, 4, 4, 4), False, True),
        ([None, 4, 4, 4, None], (4,), True, True),
        ([4, 4, 4], (4,), False, False),
    ],
)
def test_the_pattern_is_the_shortest(windows, pattern, first, last):
    expected = WindowConfig(pattern=pattern, force_full_first=first, force_full_last=last)
    assert pattern_of(windows) == expected


def test_a_model_without_windows_has_no_pattern():
    assert pattern_of([None, None]) == WindowConfig()
