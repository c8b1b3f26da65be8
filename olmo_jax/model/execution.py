"""How the model runs: how weights are unsharded, where rows go, what backward saves.

The model calls no collective. A parallel method hands in these functions; one device has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from olmo_jax.model.experts import ExpertWeights, one_expert_at_a_time
from olmo_jax.ops.attention import attention

Tree = Any
"""A unit's weights as nested dicts of arrays."""


@runtime_checkable
class RoutedExperts(Protocol):
    """Passes tokens through the experts that their routes name; also says how many it dropped."""

    def __call__(
        self,
        x: Float[Array, "t D"],
        experts: Int32[Array, "t A"],
        weights: Float32[Array, "t A"],
        padding_mask: Bool[Array, " t"],
        pool: ExpertWeights,
        /,
    ) -> tuple[Float[Array, "t D"], Int32[Array, ""]]: ...


@runtime_checkable
class Attend(Protocol):
    """Lets this device's queries attend; see `ops.attention.attention`."""

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

    `offsets` turns this device's number of positions into their indices in the row, `length` into
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
class Rematerialize(Protocol):
    """Wraps a unit's function; `scanned` says that a loop over layers calls it."""

    def __call__(
        self, function: Callable[..., Any], *, scanned: bool = False
    ) -> Callable[..., Any]: ...


def save_everything(function: Callable[..., Any], *, scanned: bool = False) -> Callable[..., Any]:
    """Return the function as it is: autodiff saves what it likes."""
    del scanned
    return function


@dataclass(frozen=True)
class Execution:
    """How the model runs: the functions that differ between one device and a mesh, and the mode.

    `unshard` turns a unit (embedding, one block, head) as stored into weights typed float32; what
    they are used on passes through it. `experts` passes tokens through the routed experts. `rows`
    says which positions this device has. `rematerialize` wraps a unit's function: it says what
    backward saves and what it rematerializes. `over_sequence` sums counts over the ranks that share
    a row, `over_data` over all data ranks. `seed` draws forced routes and jitter; jitter is drawn
    when `training` only.
    """

    unshard: Callable[[Tree, Any], tuple[Tree, Any]]
    experts: RoutedExperts
    rows: Rows
    rematerialize: Rematerialize
    over_sequence: Callable[[Array], Array]
    over_data: Callable[[Array], Array]
    seed: int
    training: bool


def one_device(*, seed: int = 0, training: bool = False) -> Execution:
    """Return how one device runs the model: no mesh, no collective, no drop.

    The oracle of every parallel method.
    """
    return Execution(
        unshard=lambda unit, x: (unit, x),
        experts=one_expert_at_a_time,
        rows=WHOLE_ROWS,
        rematerialize=save_everything,
        over_sequence=lambda value: value,
        over_data=lambda value: value,
        seed=seed,
        training=training,
    )
