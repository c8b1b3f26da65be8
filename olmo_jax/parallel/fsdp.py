"""Weights of which a device stores a shard: gathered for each use, their gradients scattered."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from olmo_jax.arch.activations import GATHERED
from olmo_jax.mesh.specs import AddedAxes
from olmo_jax.parallel import ddp


def gather(shard: Float[Array, "..."], added: AddedAxes, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Cast a shard to `dtype` and return the whole weight of all ranks along the added axes.

    Comm: an all-gather in `dtype` along the axes of each dim.
    """
    weight = shard.astype(dtype)
    with jax.named_scope("gather_unit"):
        # `dim` counts from the end, so it is the same for a stacked leaf and for one layer of it.
        for dim, axes in added:
            weight = lax.all_gather(weight, axes, axis=weight.ndim + dim, tiled=True)
    return weight


def scatter(gradient: Float32[Array, "..."], added: AddedAxes) -> Float32[Array, "..."]:
    """Sum a gradient over the ranks along the added axes, and leave each its shard.

    Comm: an FP32 reduce-scatter along the axes of each dim.
    """
    with jax.named_scope("scatter_gradient"):
        for dim, axes in added:
            dim += gradient.ndim
            gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
    return gradient


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def attach(
    shard: Float[Array, "..."],
    accumulator: Float32[Array, "..."],
    added: AddedAxes,
    dtype: jnp.dtype,
) -> Float32[Array, "..."]:
    """Gather a weight and type it float32.

    `accumulator` gets this rank's shard of the summed gradient.

    Comm: `gather` forward, `scatter` backward.
    """
    return _attach_forward(shard, accumulator, added, dtype)[0]


def _attach_forward(
    shard: Array, accumulator: Array, added: AddedAxes, dtype: jnp.dtype
) -> tuple[Float32[Array, "..."], None]:
    # Written out here: a recompute policy sees no name inside a nested custom_vjp call.
    del accumulator
    weight = checkpoint_name(gather(shard, added, dtype), GATHERED)
    return weight.astype(jnp.float32), None


def _attach_backward(
    added: AddedAxes, _: jnp.dtype, __: None, cotangent: Float32[Array, "..."]
) -> tuple[None, Float32[Array, "..."]]:
    return None, scatter(cotangent, added)


attach.defvjp(_attach_forward, _attach_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def attach_gathered(
    weight: Float[Array, "..."], accumulator: Float32[Array, "..."], added: AddedAxes
) -> Float32[Array, "..."]:
    """Type a weight that was gathered before float32; `accumulator` gets the shard of its gradient.

    Comm: backward `scatter`.
    """
    return ddp.attach(weight, accumulator)


def _attach_gathered_forward(
    weight: Array, accumulator: Array, added: AddedAxes
) -> tuple[Float32[Array, "..."], None]:
    del added
    return ddp.attach(weight, accumulator), None


def _attach_gathered_backward(
    added: AddedAxes, _: None, cotangent: Float32[Array, "..."]
) -> tuple[None, Float32[Array, "..."]]:
    return None, scatter(cotangent, added)


attach_gathered.defvjp(_attach_gathered_forward, _attach_gathered_backward)


@jax.custom_vjp
def hold_inside(weights: Any, x: Any) -> tuple[Any, Any]:
    """Tie shards to what they are used on, so that XLA moves no gather of them out of a loop.

    A barrier as JAX differentiates it would have zeros of all weights in the backward pass.
    """
    # In a loop over microbatches the shards are the same in every iteration, and so is a gather of
    # them: XLA may run it once before the loop, and then all whole weights are alive at once. x
    # changes in every iteration; behind a barrier with x, so do the shards, as far as XLA can tell.
    return lax.optimization_barrier((weights, x))


def _hold_inside_forward(weights: Any, x: Any) -> tuple[tuple[Any, Any], None]:
    return lax.optimization_barrier((weights, x)), None


def _hold_inside_backward(_: None, cotangents: tuple[Any, Any]) -> tuple[None, Any]:
    # Shards get no gradient here: theirs goes to the accumulators, in `attach`.
    return None, cotangents[1]


hold_inside.defvjp(_hold_inside_forward, _hold_inside_backward)
