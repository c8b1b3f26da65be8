"""The routed experts: their weights, what they compute of rows, and the oracle of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from olmo_jax.ops.grouped_matmul import grouped_matmul
from olmo_jax.ops.linear import linear


class ExpertWeights(NamedTuple):
    """Weights of the routed experts that this device has: all of them, or its rank's."""

    up_gate: Float32[Array, "e D F2"]
    down: Float32[Array, "e F D"]


def swiglu(x: Float[Array, "... F2"]) -> Float[Array, "... F"]:
    """Return up * silu(gate); the first half of the last dim is up, the rest gate."""
    up, gate = jnp.split(x, 2, axis=-1)
    return up * jax.nn.silu(gate)


def grouped_experts(
    pool: ExpertWeights, rows: Float[Array, "R D"], group_sizes: Int32[Array, " e"]
) -> Float[Array, "R D"]:
    """Pass rows, sorted by expert, through the experts of `pool`: what training runs."""
    hidden = checkpoint_name(grouped_matmul(rows, pool.up_gate, group_sizes), "expert_hidden")
    output = grouped_matmul(swiglu(hidden), pool.down, group_sizes)
    return checkpoint_name(output, "expert_output")


def one_expert_at_a_time(
    x: Float[Array, "t D"],
    experts: Int32[Array, "t A"],
    weights: Float32[Array, "t A"],
    padding_mask: Bool[Array, " t"],
    pool: ExpertWeights,
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
    """Pass every token through every expert, and keep what its routes weigh. Drops nothing.

    The oracle: it shares no code with dispatch and combine, and the parallel methods are measured
    against it.
    """
    # E times the work of routing, and nothing in it that can be wrong in the same way: no sort, no
    # row, no capacity.
    scale = jnp.where(padding_mask[:, None], weights, 0.0)

    def add(total: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        number, up_gate, down = expert
        share = jnp.sum(jnp.where(experts == number, scale, 0.0), axis=1, keepdims=True)
        y = linear(swiglu(linear(x, up_gate)), down)
        return total + share * y.astype(jnp.float32), None

    numbers = jnp.arange(pool.down.shape[0], dtype=jnp.int32)
    y, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (numbers, *pool))
    return y.astype(x.dtype), jnp.zeros((), jnp.int32)
