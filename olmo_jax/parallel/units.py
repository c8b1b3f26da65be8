"""How a unit (embedding, one block, head) reads the weights that a device keeps of it.

One record and one function for all methods: what is cut is gathered, what is whole is only typed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.rules import Cuts
from olmo_jax.ops.varying import vary_over
from olmo_jax.parallel import ddp, fsdp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """A weight as it is kept, and the place that its FP32 gradient goes to.

    `cuts` is how `sink` lies within the whole weight. `weight` lies so too, unless it was
    `gathered` before. `dtype` is the compute dtype.
    """

    weight: Float[Array, "..."]
    sink: Float32[Array, "..."]
    cuts: Cuts = field(default=(), metadata={"static": True})
    gathered: bool = field(default=False, metadata={"static": True})
    dtype: jnp.dtype = field(default=jnp.dtype(jnp.float32), metadata={"static": True})


def _weight(kept: Kept) -> Float32[Array, "..."]:
    if not kept.cuts:
        return ddp.attach(kept.weight.astype(kept.dtype), kept.sink)
    if kept.gathered:
        return fsdp.attach_gathered(kept.weight, kept.sink, kept.cuts)
    return fsdp.attach(kept.weight, kept.sink, kept.cuts, kept.dtype)


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, Kept)


def read(unit: Any, x: Any) -> tuple[Any, Any]:
    """Return a unit's leaves typed float32, weights tied to their sinks; x is what it is used on.

    No gather of a weight moves to where x is not there yet: out of a loop.
    """
    leaves, tree = jax.tree.flatten(unit, is_leaf=_is_kept)
    shards = {
        i: leaf.weight
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Kept) and leaf.cuts and not leaf.gathered
    }
    if shards:
        shards, x = fsdp.hold_inside(shards, x)
    for i, shard in shards.items():
        leaves[i] = replace(leaves[i], weight=shard)
    weights = [_weight(leaf) if isinstance(leaf, Kept) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, weights), x


def own(weights: dict[str, Array]) -> dict[str, Array]:
    """Mark weights as this device's own, so that their gradients stay on the device.

    Without it autodiff inserts the reduction where the weight is used: once a microbatch.
    """
    return {name: vary_over(weight, AXES) for name, weight in weights.items()}


def zeros(shapes: dict[str, Any]) -> dict[str, Array]:
    """Return FP32 zeros of each shape: first accumulators, or sinks.

    As sinks XLA never stores them: nothing reads their values.
    """
    return {
        name: vary_over(jnp.zeros(leaf.shape, jnp.float32), AXES) for name, leaf in shapes.items()
    }
