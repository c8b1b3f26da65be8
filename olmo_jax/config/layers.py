"""Which layers are scanned together, and which stage of a pipeline each is in. No jax."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from olmo_jax.config.records import ModelConfig


@dataclass(frozen=True)
class LayerPlan:
    """Layer numbers in order: `leading` and `trailing` stand outside the scan over `body`.

    `body` is homogeneous (all routed, or all dense in a model without routed layers) and its
    windows repeat every `period` layers, which is the unit of the scan.
    """

    leading: tuple[int, ...]
    body: tuple[int, ...]
    period: int
    trailing: tuple[int, ...]


def window_of(model: ModelConfig, layer: int) -> int | None:
    """Return the window of `layer` in positions, itself included; None sees everything before it.

    Source: olmo_core 3.0.0, nn/attention, SlidingWindowAttentionConfig.
    """
    windows = model.windows
    if not windows.pattern:
        return None
    if windows.force_full_first and layer == 0:
        return None
    if windows.force_full_last and layer == model.num_layers - 1:
        return None
    window = windows.pattern[(layer - windows.force_full_first) % len(windows.pattern)]
    return None if window == -1 else window


def is_routed(model: ModelConfig, layer: int) -> bool:
    """Say whether `layer` has routed experts: all but the leading dense ones."""
    return layer >= model.num_dense_layers


def _fits(model: ModelConfig, start: int, stop: int, period: int) -> bool:
    windows = [window_of(model, layer) for layer in range(start, stop)]
    return all(window == windows[i % period] for i, window in enumerate(windows))


def layer_plan(model: ModelConfig) -> LayerPlan:
    """Split the layers into leading, body and trailing; the body is as long as it can be.

    Of two such bodies the later one: a pipeline has no place for trailing layers.
    """
    routed = model.num_routed_layers > 0
    first = model.num_dense_layers if routed else 0
    period = max(len(model.windows.pattern), 1)
    for length in range(model.num_layers - first, 0, -1):
        if length % period:
            continue
        for start in range(model.num_layers - length, first - 1, -1):
            if _fits(model, start, start + length, period):
                return _plan(model, start, start + length, period)
    return _plan(model, first, model.num_layers, model.num_layers - first)


def _plan(model: ModelConfig, start: int, stop: int, period: int) -> LayerPlan:
    return LayerPlan(
        leading=tuple(range(start)),
        body=tuple(range(start, stop)),
        period=period,
        trailing=tuple(range(stop, model.num_layers)),
    )


EMPTY = -1
"""The number that stands in a place without a layer."""


class Grid(NamedTuple):
    """`layer[c, r, i]` is the body layer (from 0) in place i of chunk c of rank r, or `EMPTY`.

    Layers are in order of stages, c P + r, and the empty places at the end of that order. An empty
    place is computed and passes its input on.
    """

    layer: Int32[np.ndarray, "chunks ranks places"]
    num_layers: int

    @property
    def num_places(self) -> int:
        return self.layer.size

    def model_layers(self, plan: LayerPlan) -> Int32[np.ndarray, "chunks ranks places"]:
        """Return the same as numbers of the model's layers."""
        return np.where(self.layer == EMPTY, EMPTY, self.layer + plan.body[0]).astype(np.int32)

    @property
    def waste(self) -> int:
        """Return how many places are empty, in all ranks and chunks together."""
        return self.num_places - self.num_layers


def grid(num_layers: int, ranks: int, chunks: int, *, period: int = 1) -> Grid:
    """Return where each body layer goes.

    `period` is that of the window pattern. A place has the same window on all ranks and chunks, so
    a stage holds whole periods.
    """
    stages = ranks * chunks
    places = -(-num_layers // (stages * period)) * period
    layer = np.arange(stages * places, dtype=np.int32)
    layer[num_layers:] = EMPTY
    return Grid(layer.reshape(chunks, ranks, places), num_layers)


def body_grid(model: ModelConfig, ranks: int, chunks: int) -> Grid:
    """Return where each layer of the model's body goes."""
    plan = layer_plan(model)
    return grid(len(plan.body), ranks, chunks, period=plan.period)


def least_waste(num_layers: int, ranks: int, *, period: int = 1) -> tuple[int, ...]:
    """Return the chunk counts that leave the fewest places empty, in ascending order.

    One chunk is always among them: what divides over more divides over one. More chunks make the
    bubble smaller, and the messages more.
    """
    counts = range(1, max(num_layers // (ranks * period), 1) + 1)
    waste = {chunks: grid(num_layers, ranks, chunks, period=period).waste for chunks in counts}
    return tuple(chunks for chunks in counts if waste[chunks] == min(waste.values()))
