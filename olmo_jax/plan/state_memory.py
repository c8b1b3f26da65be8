"""What one device holds of a run's state, from the config and the sizes of the mesh alone.

Activations, buffers of transfers and the work space of kernels come on top.
"""

import math
from collections import Counter
from typing import NamedTuple

from olmo_jax.arch.sizes import ITEM_BYTES
from olmo_jax.mesh.layout import Layout
from olmo_jax.mesh.specs import axes_used, num_shards

STATE_BYTES = 12
"""Of a parameter: main weight and two moments in FP32. A checkpoint has as many."""


class Memory(NamedTuple):
    """Bytes of one device.

    `weights` in the compute dtype stay between steps, as do `main`, `moments` and `others` (router
    biases, the history of losses and norms, counters). `gradients` are the FP32 accumulators of a
    step; under a pipeline a tied embedding has two, one for each end of the model. Padding layers
    of its stages are state too. `gathered` is the most that FSDP holds of gathered weights: one
    unit, or all.
    """

    weights: int
    gradients: int
    main: int
    moments: int
    others: int
    gathered: int

    @property
    def state(self) -> int:
        """Return what is carried from step to step."""
        return self.weights + self.main + self.moments + self.others

    @property
    def persistent(self) -> int:
        """Return what is held through a step: the state and the gradients."""
        return self.state + self.gradients


def state_memory(layout: Layout) -> Memory:
    """Return what one device holds, by the specs of every parameter.

    Per parameter that divides, N being the ranks that share it: DDP 6 + 12/N bytes (18 with
    `parallel.shard_optimizer=false`), FSDP 16/N and what is gathered.

    Raises: UserError if a parameter cannot be laid out on a mesh of these sizes.
    """
    sharded = layout.sharded
    resident = sum(leaf.elements(leaf.specs.resident) for leaf in sharded)
    main = sum(leaf.elements(leaf.specs.main) for leaf in sharded)
    keeps_weights = layout.keeps_weights
    return Memory(
        weights=ITEM_BYTES[layout.model.dtype] * resident if keeps_weights else 0,
        gradients=4 * (resident + _summed_twice(layout)),
        main=4 * main,
        moments=8 * main,
        others=_others(layout),
        gathered=0 if keeps_weights else _gathered(layout),
    )


def _summed_twice(layout: Layout) -> int:
    """Return the elements whose gradients both ends of a pipelined model add up."""
    if layout.sizes["pipeline"] == 1 or not layout.model.tie_embeddings:
        return 0
    (table,) = (leaf for leaf in layout.sharded if leaf.name == "embedding.weight")
    return table.elements(table.specs.resident)


def whole_when_saved(layout: Layout) -> int:
    """Return the bytes of FP32 weights and moments that lie on every pipeline rank during a save.

    Those of the body whose layers a pipeline divides, where it divides no other dim.
    """
    bytes_there = 0
    for leaf in layout.sharded:
        spec = layout.stored_spec(leaf.name)
        if layout.is_staged(leaf.name) and "pipeline" not in axes_used(spec):
            elements = math.prod(layout.stored_shape(leaf.name))
            bytes_there += STATE_BYTES * elements // num_shards(axes_used(spec), layout.sizes)
    return bytes_there


def _others(layout: Layout) -> int:
    """Return two counters, the history of the skip rule and its size, and each router's bias."""
    biases = sum(leaf.size for leaf in layout.expert_biases.values())
    return 4 * (2 + 2 * layout.config.optim.skip_window + 1 + biases)


def _gathered(layout: Layout) -> int:
    """Return the largest unit if each is given up after its use, else all of them."""
    item = ITEM_BYTES[layout.model.dtype]
    if layout.config.parallel.reshard != "full":
        return item * sum(leaf.elements(leaf.specs.compute) for leaf in layout.sharded)
    # One unit at a time is whole: the embedding, one block, or the head. A leaf of the body holds
    # all layers of a rank, and one of them is gathered; a tied table is part of the head too.
    units: Counter[str] = Counter()
    for leaf in layout.sharded:
        tied = layout.model.tie_embeddings and leaf.name == "embedding.weight"
        for unit in (leaf.unit, "head") if tied else (leaf.unit,):
            units[unit] += item * leaf.elements(leaf.specs.compute) // leaf.num_layers
    return max(units.values())
