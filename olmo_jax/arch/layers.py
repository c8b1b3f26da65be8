"""Which layers are scanned together, and which stage of a pipeline each is in. No jax."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from olmo_jax.config.records import ModelConfig


@dataclass(frozen=True)
class LayerGroups:
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


def layer_groups(model: ModelConfig) -> LayerGroups:
    """Split the layers into leading, body and trailing; the body is as long as it can be.

    Of two such bodies the later one: a pipeline has no stage for trailing layers.
    """
    # Pattern w w w F, no end forced full, 10 layers, layer 0 dense: of 9 routed layers 8 are whole
    # periods.
    #
    #     layer    0  1  2  3  4  5  6  7  8  9
    #     window   w  w  w  F  w  w  w  F  w  w
    #     group    leading  body, w F w w twice: a period begins at any phase of the pattern
    routed = model.num_routed_layers > 0
    first = model.num_dense_layers if routed else 0
    period = max(len(model.windows.pattern), 1)
    for length in range(model.num_layers - first, 0, -1):
        if length % period:
            continue
        for start in range(model.num_layers - length, first - 1, -1):
            if _fits(model, start, start + length, period):
                return _groups(model, start, start + length, period)
    return _groups(model, first, model.num_layers, model.num_layers - first)


def _groups(model: ModelConfig, start: int, stop: int, period: int) -> LayerGroups:
    return LayerGroups(
        leading=tuple(range(start)),
        body=tuple(range(start, stop)),
        period=period,
        trailing=tuple(range(stop, model.num_layers)),
    )


PADDING_LAYER = -1
"""Stands in a stage layout where no layer of the model is."""


class StageLayout(NamedTuple):
    """Which body layer each stage of a pipeline holds.

    `layers[c, r, i]` is the number, from 0 in the body, of the i-th layer of chunk c on rank r, or
    `PADDING_LAYER`. Layers are in order of stages, c P + r; padding layers fill up the last ones.
    With 7 layers on 2 ranks and 2 chunks:

        chunk 0:  rank 0 [0 1]  rank 1 [2 3]
        chunk 1:  rank 0 [4 5]  rank 1 [6 -]

    A padding layer is computed like any other, since one program runs on all ranks, and passes its
    input on.
    """

    layers: Int32[np.ndarray, "chunks ranks layers"]
    num_layers: int

    @property
    def num_positions(self) -> int:
        """Return the layers that the stages have room for, padding layers included."""
        return self.layers.size

    @property
    def num_padding(self) -> int:
        """Return how many padding layers there are, in all ranks and chunks together."""
        return self.num_positions - self.num_layers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (chunks, ranks, layers of a stage)."""
        chunks, ranks, layers = self.layers.shape
        return chunks, ranks, layers

    def model_layers(self, groups: LayerGroups) -> Int32[np.ndarray, "chunks ranks layers"]:
        """Return the same as numbers of the model's layers."""
        is_padding = self.layers == PADDING_LAYER
        return np.where(is_padding, PADDING_LAYER, self.layers + groups.body[0]).astype(np.int32)


def stage_layout(num_layers: int, ranks: int, chunks: int, *, period: int = 1) -> StageLayout:
    """Return which stage holds each body layer.

    `period` is that of the window pattern. A layer of a stage has the same window on all ranks and
    chunks, so a stage holds whole periods.
    """
    stages = ranks * chunks
    # Rounded up to whole periods, not to layers: 6 layers of period 2 on 2 stages are 4 a stage.
    per_stage = -(-num_layers // (stages * period)) * period
    layers = np.arange(stages * per_stage, dtype=np.int32)
    layers[num_layers:] = PADDING_LAYER
    return StageLayout(layers.reshape(chunks, ranks, per_stage), num_layers)


def body_stages(model: ModelConfig, ranks: int, chunks: int) -> StageLayout:
    """Return which stage holds each layer of the model's body."""
    groups = layer_groups(model)
    return stage_layout(len(groups.body), ranks, chunks, period=groups.period)


def least_padding(num_layers: int, ranks: int, *, period: int = 1) -> tuple[int, ...]:
    """Return the chunk counts that need the fewest padding layers, in ascending order.

    One chunk is always among them: what divides over more divides over one. More chunks make the
    bubble smaller, and the messages more.
    """
    counts = range(1, max(num_layers // (ranks * period), 1) + 1)
    padding = {
        chunks: stage_layout(num_layers, ranks, chunks, period=period).num_padding
        for chunks in counts
    }
    return tuple(chunks for chunks in counts if padding[chunks] == min(padding.values()))
