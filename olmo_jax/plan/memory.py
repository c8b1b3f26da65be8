"""What one device holds of a run's state, from the config and the sizes of the mesh alone.

Activations, buffers of transfers and the work space of kernels come on top.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from olmo_jax.config.layers import layer_plan
from olmo_jax.config.records import Config
from olmo_jax.mesh.rules import METHODS, STAGED, axes_used, layers_spec
from olmo_jax.plan.placed import Leaf, leaves, parts
from olmo_jax.plan.static_sizes import ITEM_BYTES

Sizes = Mapping[str, int]


class Memory(NamedTuple):
    """Bytes of one device.

    `weights` in the compute dtype stay between steps, as do `main`, `moments` and `others` (router
    biases, the history of losses and norms, counters). `gradients` are the FP32 accumulators of a
    step; under a pipeline a tied embedding has two, one for each end of the model. Empty places of
    its stages are state too. `gathered` is what FSDP holds at most of weights that were gathered:
    one unit, or all.
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


def memory(config: Config, sizes: Sizes) -> Memory:
    """Return what one device holds, by the specs of every parameter.

    Per parameter that divides, N being the ranks that share it: DDP 6 + 12/N bytes (18 with
    `parallel.shard_optimizer=false`), FSDP 16/N and what is gathered.

    Raises: UserError if a parameter cannot be laid out on a mesh of these sizes.
    """
    placed = leaves(config, sizes)
    resident = sum(leaf.elements(leaf.placed.resident) for leaf in placed)
    main = sum(leaf.elements(leaf.placed.main) for leaf in placed)
    keeps_weights = METHODS[config.parallel.method].keeps_weights
    return Memory(
        weights=ITEM_BYTES[config.model.dtype] * resident if keeps_weights else 0,
        gradients=4 * (resident + _summed_twice(config, placed, sizes)),
        main=4 * main,
        moments=8 * main,
        others=_others(config),
        gathered=0 if keeps_weights else _gathered(config, placed),
    )


def _summed_twice(config: Config, placed: list[Leaf], sizes: Sizes) -> int:
    """Return the elements whose gradients both ends of a pipelined model add up."""
    if sizes["pipeline"] == 1 or not config.model.tie_embeddings:
        return 0
    (table,) = (leaf for leaf in placed if leaf.name == "embedding.weight")
    return table.elements(table.placed.resident)


def whole_when_saved(config: Config, sizes: Sizes) -> int:
    """Return the bytes of FP32 weights and moments that lie on every pipeline rank during a save.

    Those of the body whose layers a pipeline divides, where it divides no other dim.
    """
    bytes_there = 0
    for leaf in leaves(config, sizes):
        if "stages" not in leaf.shape.dims:
            continue
        shape = (len(layer_plan(config.model).body), *leaf.shape.shape[len(STAGED) :])
        spec = layers_spec(shape, leaf.placed.main, sizes)
        if "pipeline" not in axes_used(spec):
            bytes_there += 12 * math.prod(shape) // parts(axes_used(spec), sizes)
    return bytes_there


def _others(config: Config) -> int:
    """Return two counters, the history of the skip rule and its size, and each router's bias."""
    model, router = config.model, config.model.router
    has_bias = router.bias_gamma is not None or router.score_correction_bias
    biases = model.num_routed_layers * model.num_experts if has_bias else 0
    return 4 * (2 + 2 * config.optim.skip_window + 1 + biases)


def _gathered(config: Config, placed: list[Leaf]) -> int:
    """Return the largest unit if each is given up after its use, else all of them."""
    item = ITEM_BYTES[config.model.dtype]
    if config.parallel.reshard != "full":
        return item * sum(leaf.elements(leaf.placed.compute) for leaf in placed)
    units: Counter[str] = Counter()
    for leaf in placed:
        tied = config.model.tie_embeddings and leaf.name == "embedding.weight"
        for unit in (leaf.unit, "head") if tied else (leaf.unit,):
            units[unit] += item * leaf.elements(leaf.placed.compute) // leaf.layers
    return max(units.values())
