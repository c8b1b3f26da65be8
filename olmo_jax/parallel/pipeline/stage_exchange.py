"""The body's leaves: by stages in a step, by layers in a checkpoint, and the way between."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from olmo_jax.parallel.pipeline.transfers import PIPELINE

_STAGE = 1
_MORE = 2
"""As many dims more than a leaf by layers has a leaf by stages."""

Stages = tuple[int, int, int]
"""(chunks, ranks, layers of a stage): the layers in order, then padding layers."""


def to_layers(
    leaf: Float32[Array, "chunks 1 padded ..."], stages: Stages, num_layers: int, dim: int | None
) -> Float32[Array, "layers ..."]:
    """Bring the layers of all stages together, and leave this rank its part of the result's `dim`.

    Without a `dim` every rank gets the whole.

    Comm: an all-to-all along `pipeline` of the leaf; without a `dim` an all-gather.
    """
    with jax.named_scope("stages_to_layers"):
        if dim is None:
            whole = lax.all_gather(leaf, PIPELINE, axis=_STAGE, tiled=True, to="invarying")
        else:
            whole = lax.all_to_all(leaf, PIPELINE, dim + _MORE, _STAGE, tiled=True)
        # Row-major [chunks, ranks, layers of a stage] is the order of the layers, since stage
        # c P + r is chunk c of rank r. Padding layers come last and are dropped.
        return whole.reshape(math.prod(stages), *whole.shape[3:])[:num_layers]


def to_stages(
    leaf: Float32[Array, "layers ..."], stages: Stages, num_layers: int, dim: int | None
) -> Float32[Array, "chunks 1 padded ..."]:
    """Give each rank the layers of its stages, and zeros as padding layers.

    Comm: an all-to-all along `pipeline` of the leaf; without a `dim` nothing.
    """
    with jax.named_scope("layers_to_stages"):
        rest = ((0, 0),) * (leaf.ndim - 1)
        whole = jnp.pad(leaf, ((0, math.prod(stages) - num_layers), *rest))
        whole = whole.reshape(*stages, *leaf.shape[1:])
        if dim is None:
            return lax.dynamic_slice_in_dim(whole, lax.axis_index(PIPELINE), 1, _STAGE)
        return lax.all_to_all(whole, PIPELINE, _STAGE, dim + _MORE, tiled=True)
