"""What an optimizer step moves: gradients to the FP32 shard, updated weights back to compute."""

from collections import defaultdict

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from olmo_jax.mesh.specs import ParameterSpecs, added_axes, axes_used, replica_axes


def reduce_to_main(gradient: Float32[Array, "..."], specs: ParameterSpecs) -> Float32[Array, "..."]:
    """Sum a device's own gradient over all replicas and leave each its shard.

    Comm: FP32, once a step: a reduce-scatter over the axes that `main` adds to `resident`
    (4 (n-1)/n bytes an element), an all-reduce over the axes that stay replica axes.
    """
    left = replica_axes(specs.main)
    with jax.named_scope("reduce_gradients"):
        for dim, axes in added_axes(specs.resident, specs.main):
            dim += gradient.ndim
            gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
        return lax.psum(gradient, left) if left else gradient


def gather_to_resident(
    main: Float32[Array, "..."], specs: ParameterSpecs, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Cast the updated shard to the compute dtype, and give every replica the whole of it.

    Comm: an all-gather in the compute dtype, once a step, over the axes that `main` adds.
    """
    weight = main.astype(dtype)
    with jax.named_scope("gather_weights"):
        for dim, axes in added_axes(specs.resident, specs.main):
            dim += weight.ndim
            weight = lax.all_gather(weight, axes, axis=dim, tiled=True, to="invarying")
    return weight


def global_norm(
    gradients: dict[str, Float32[Array, "..."]], specs: dict[str, ParameterSpecs]
) -> Float32[Array, ""]:
    """Return the norm of all logical gradients, each element once, the same on every rank.

    Comm: an all-reduce of one FP32 number for each set of axes that divides some leaf.
    """
    # A shard is summed over the axes that divide its leaf and over no others: along a replica axis
    # the same elements would count once a rank.
    squares = defaultdict(list)
    for name, gradient in gradients.items():
        squares[axes_used(specs[name].main)].append(jnp.sum(jnp.square(gradient)))
    with jax.named_scope("gradient_norm"):
        sums = [_sum_over(jnp.stack(parts).sum(), axes) for axes, parts in squares.items()]
    return jnp.sqrt(jnp.stack(sums).sum())


def _sum_over(value: Float32[Array, ""], axes: tuple[str, ...]) -> Float32[Array, ""]:
    return lax.psum(value, axes) if axes else value
