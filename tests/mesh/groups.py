"""Which ranks are in one group, counted out on a grid of ranks."""

import math

import numpy as np

from olmo_jax.mesh.axes import (
    AXES,
    DENSE_DATA_AXES,
    TOKEN_AXES,
    expert_model_axes,
)


def expert_data_axes(*, fold_sequence=False):
    """Return the axes of the expert view that repeat experts (EP-DP): experts see positions alike.

    Source: olmo_core 3.0.0, distributed/parallel (the MoE mesh of a DDP train module).
    """
    split = expert_model_axes(fold_sequence=fold_sequence)
    return tuple(axis for axis in TOKEN_AXES if axis not in split)


def groups(sizes, axes):
    """Return the groups of ranks that differ along `axes` only, each in rank order."""
    ranks = np.arange(math.prod(sizes[axis] for axis in AXES))
    grid = ranks.reshape([sizes[axis] for axis in AXES])
    inside = [i for i, axis in enumerate(AXES) if axis in axes]
    outside = [i for i, axis in enumerate(AXES) if axis not in axes]
    width = math.prod(sizes[AXES[i]] for i in inside)
    return grid.transpose(outside + inside).reshape(-1, width).tolist()


def expert_model_groups(sizes, *, fold_sequence=False):
    """Return the groups of ranks that hold one copy of the experts between them."""
    return groups(sizes, expert_model_axes(fold_sequence=fold_sequence))


def expert_data_groups(sizes, *, fold_sequence=False):
    """Return the groups of ranks that hold the same experts."""
    return groups(sizes, expert_data_axes(fold_sequence=fold_sequence))


def dense_data_groups(sizes):
    """Return the groups of ranks with the same positions of different rows (dense DP)."""
    return groups(sizes, DENSE_DATA_AXES)


def dense_gradient_groups(sizes):
    """Return the groups of ranks that a dense gradient is summed over: rows and positions."""
    return groups(sizes, TOKEN_AXES)
