"""Hugging Face lists every layer's attention, a config has a pattern: from one to the other."""

from collections.abc import Sequence
from itertools import product

from olmo_jax.arch.layers import window_of
from olmo_jax.config.records import ModelConfig, WindowConfig


def windows_of(model: ModelConfig) -> list[int | None]:
    """Return the window of every layer."""
    return [window_of(model, layer) for layer in range(model.num_layers)]


def pattern_of(windows: Sequence[int | None]) -> WindowConfig:
    """Return the shortest pattern that gives layer i the window `windows[i]`, None being full.

    A forced full layer at an end is tried only where the plain pattern of that length fails.
    """
    wanted = list(windows)
    if not any(wanted):
        return WindowConfig()
    layers = [-1 if window is None else window for window in wanted]
    for length, first, last in product(range(1, len(layers) + 1), (False, True), (False, True)):
        pattern = tuple(layers[first : first + length])
        candidate = WindowConfig(pattern=pattern, force_full_first=first, force_full_last=last)
        if windows_of(ModelConfig(num_layers=len(layers), windows=candidate)) == wanted:
            return candidate
    raise AssertionError("a pattern as long as the model gives any list")
