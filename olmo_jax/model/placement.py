"""What the model must be told of where it runs: how weights are read, and where rows go.

The model calls no collective. A parallel method hands in these functions; one device has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from olmo_jax.ops.attention import attention
from olmo_jax.ops.linear import linear

Tree = Any
"""A unit's weights as nested dicts of arrays."""


class ExpertWeights(NamedTuple):
    """Weights of the routed experts at hand: all of them, or this rank's."""

    up_gate: Float32[Array, "e D F2"]
    down: Float32[Array, "e F D"]


@runtime_checkable
class RoutedExperts(Protocol):
    """Passes tokens through the experts that their routes name; also says how many it dropped."""

    def __call__(
        self,
        x: Float[Array, "t D"],
        experts: Int32[Array, "t A"],
        weights: Float32[Array, "t A"],
        real: Bool[Array, " t"],
        pool: ExpertWeights,
        /,
    ) -> tuple[Float[Array, "t D"], Int32[Array, ""]]: ...


@runtime_checkable
class Attend(Protocol):
    """Lets the queries at hand attend; see `ops.attention.attention`."""

    def __call__(
        self,
        q: Float[Array, "B L N H"],
        k: Float[Array, "B L K H"],
        v: Float[Array, "B L K H"],
        *,
        segment_ids: Int[Array, "B row"] | None,
        window: int | None,
        scale: float,
    ) -> Float[Array, "B L N H"]: ...


@dataclass(frozen=True)
class Rows:
    """Which positions of its rows a device holds, and how attention sees the others.

    `offsets` turns the number of positions at hand into their places in the row, `length` into
    that of the whole row without padding. `attend` takes the segment ids of whole rows.
    """

    attend: Attend
    offsets: Callable[[int], Int32[Array, " l"]]
    length: Callable[[int], int]


WHOLE_ROWS = Rows(
    attend=attention,
    offsets=partial(jnp.arange, dtype=jnp.int32),
    length=lambda number: number,
)
"""A device that holds all positions of its rows."""


@runtime_checkable
class Recomputed(Protocol):
    """Wraps a unit's function; `scanned` says that a loop over layers calls it."""

    def __call__(
        self, function: Callable[..., Any], *, scanned: bool = False
    ) -> Callable[..., Any]: ...


def keep_everything(function: Callable[..., Any], *, scanned: bool = False) -> Callable[..., Any]:
    """Return the function as it is: autodiff keeps what it likes."""
    del scanned
    return function


@dataclass(frozen=True)
class Placement:
    """The functions that differ between one device and a mesh.

    `rows` says which positions are at hand. `read` turns a unit (embedding, one block, head) as
    stored into weights typed float32; what they are used on passes through it.
    `recomputed` wraps a unit's function: it says what backward keeps and what it computes again.
    `over_sequence` sums counts over the ranks that share a row, `over_data` over all data ranks.
    """

    read: Callable[[Tree, Any], tuple[Tree, Any]]
    experts: RoutedExperts
    rows: Rows
    recomputed: Recomputed
    over_sequence: Callable[[Array], Array]
    over_data: Callable[[Array], Array]


def swiglu(x: Float[Array, "... F2"]) -> Float[Array, "... F"]:
    """Return up * silu(gate); the first half of the last dim is up, the rest gate."""
    up, gate = jnp.split(x, 2, axis=-1)
    return up * jax.nn.silu(gate)


def _one_expert_at_a_time(
    x: Float[Array, "t D"],
    experts: Int32[Array, "t A"],
    weights: Float32[Array, "t A"],
    real: Bool[Array, " t"],
    pool: ExpertWeights,
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
    """Pass every token through every expert, and keep what its routes weigh. Drops nothing.

    It shares no code with dispatch and combine: the parallel methods are measured against it.
    """
    scale = jnp.where(real[:, None], weights, 0.0)

    def add(total: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        number, up_gate, down = expert
        share = jnp.sum(jnp.where(experts == number, scale, 0.0), axis=1, keepdims=True)
        y = linear(swiglu(linear(x, up_gate)), down)
        return total + share * y.astype(jnp.float32), None

    numbers = jnp.arange(pool.down.shape[0], dtype=jnp.int32)
    y, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (numbers, *pool))
    return y.astype(x.dtype), jnp.zeros((), jnp.int32)


ONE_DEVICE = Placement(
    read=lambda unit, x: (unit, x),
    experts=_one_expert_at_a_time,
    rows=WHOLE_ROWS,
    recomputed=keep_everything,
    over_sequence=lambda value: value,
    over_data=lambda value: value,
)
"""No mesh, no collective, no drop: the oracle of every parallel method."""
