"""How a unit (embedding, one block, head) gets whole weights from the shards of a device.

One record and one function for all methods: a shard is gathered, a whole weight is only typed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.specs import AddedAxes
from olmo_jax.ops.varying import vary_over
from olmo_jax.parallel import ddp, fsdp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightShard:
    """A weight as a device stores it, and the accumulator of its FP32 gradient.

    `added` are the axes that divide `accumulator` further than the compute weight. They divide
    `weight` too, unless it was `gathered` before. `dtype` is the compute dtype.
    """

    weight: Float[Array, "..."]
    accumulator: Float32[Array, "..."]
    added: AddedAxes = field(default=(), metadata={"static": True})
    gathered: bool = field(default=False, metadata={"static": True})
    dtype: jnp.dtype = field(default=jnp.dtype(jnp.float32), metadata={"static": True})


def _weight(shard: WeightShard) -> Float32[Array, "..."]:
    if not shard.added:
        return ddp.attach(shard.weight.astype(shard.dtype), shard.accumulator)
    if shard.gathered:
        return fsdp.attach_gathered(shard.weight, shard.accumulator, shard.added)
    return fsdp.attach(shard.weight, shard.accumulator, shard.added, shard.dtype)


def _is_shard(leaf: Any) -> bool:
    return isinstance(leaf, WeightShard)


def unshard(unit: Any, x: Any) -> tuple[Any, Any]:
    """Return a unit's leaves typed float32, weights tied to their accumulators.

    x is what the unit is used on: no gather of a weight moves to where x is not computed yet, out
    of a loop.
    """
    leaves, tree = jax.tree.flatten(unit, is_leaf=_is_shard)
    shards = {
        i: leaf.weight
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, WeightShard) and leaf.added and not leaf.gathered
    }
    # One barrier for all shards of the unit: they may be gathered together, and none before x.
    if shards:
        shards, x = fsdp.hold_inside(shards, x)
    for i, shard in shards.items():
        leaves[i] = replace(leaves[i], weight=shard)
    weights = [_weight(leaf) if isinstance(leaf, WeightShard) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, weights), x


def zeros(shapes: dict[str, Any]) -> dict[str, Array]:
    """Return FP32 zeros of each shape: what gradients are added to, or stands for it in autodiff.

    For the latter XLA stores nothing: nobody reads their values.
    """
    return {
        name: vary_over(jnp.zeros(leaf.shape, jnp.float32), AXES) for name, leaf in shapes.items()
    }
