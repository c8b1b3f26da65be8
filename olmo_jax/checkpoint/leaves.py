"""A state as the leaves of a checkpoint: by role and logical name, as no mesh lays them out."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from olmo_jax.checkpoint.protocols import S, State
from olmo_jax.optim.opt_state import StateParts, join, split

Tree = dict[str, dict[str, Any]]
"""Arrays, or what describes them, by role and name."""

WEIGHTS = ("main", "router_bias")
"""The roles that a model is computed from; the others belong to its training."""


class Key(NamedTuple):
    """A leaf of a checkpoint."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def stored(state: State) -> Tree:
    """Return what is stored of a state: all but the compute weights, which `main` determines.

    Of the optimizer's state each part that follows the parameters is a role by its own name, and
    any other array a leaf of `counters`. The state is one of `Program.stored`, whose leaves no mesh
    has divided.
    """
    parts = split(state.opt_state, state.main.keys())
    others = {_counter(name): leaf for name, leaf in parts.others.items()}
    # As keyword arguments, a name of the optimizer that is taken is an error.
    tree: Tree = dict(
        main=state.main,
        router_bias=state.expert_bias,
        history=state.history,
        counters=dict(step=state.step, **others),
        **parts.parameters,
    )
    return {role: dict(leaves) for role, leaves in tree.items() if leaves}


def opt_state_of(tree: Tree, like: State) -> Any:
    """Return the optimizer's state out of a restored tree; `like` is a state of the same kind."""
    names = like.main.keys()
    parts = split(like.opt_state, names)
    found = StateParts(
        parameters={role: tree[role] for role in parts.parameters},
        others={name: tree["counters"][_counter(name)] for name in parts.others},
    )
    return join(found, like.opt_state, names)


def _counter(name: str) -> str:
    """Return the name in a checkpoint of an array that follows no parameters."""
    return "moments" if name == "count" else name


def unstored(tree: Tree, like: S) -> S:
    """Return the state of a restored tree, without compute weights; `like` is of the same kind."""
    return like._replace(
        weights={},
        main=tree["main"],
        opt_state=opt_state_of(tree, like),
        expert_bias=tree.get("router_bias", {}),
        history=tree["history"],
        step=tree["counters"]["step"],
    )


def flat(tree: Mapping[str, Mapping[str, Any]]) -> dict[Key, Any]:
    """Return the leaves by key, in a fixed order."""
    return {
        Key(role, name): leaf
        for role, leaves in sorted(tree.items())
        for name, leaf in sorted(leaves.items())
    }


def nested(leaves: Mapping[Key, Any]) -> Tree:
    """Return the leaves as a tree again."""
    tree: Tree = {}
    for key, leaf in leaves.items():
        tree.setdefault(key.role, {})[key.name] = leaf
    return tree


def resized(history: Mapping[str, jax.Array], window: int) -> dict[str, jax.Array]:
    """Return the skip rule's history in another window: the newest steps of it, newest last."""
    size = jnp.minimum(history["size"], window)
    return {
        name: size.astype(jnp.int32) if name == "size" else _newest(leaf, window)
        for name, leaf in history.items()
    }


def _newest(past: jax.Array, window: int) -> jax.Array:
    kept = past[max(0, len(past) - window) :]
    return jnp.pad(kept, (window - len(kept), 0))


def blocks(shape: tuple[int, ...], num_elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield a leaf's blocks of at most so many elements, as slices of every dim.

    A block takes whole trailing dims and a stretch of one dim: most have the same shape.
    """
    # [4, 3, 5] in blocks of 10: one index of dim 0 has 15 elements, too many, so each is split in
    # turn, into [2, 5] and [1, 5]. [4, 2, 5] would be 4 blocks of [1, 2, 5].
    if not shape:
        yield ()
        return
    below = 1
    for size in shape[1:]:
        below *= size
    if below > num_elements:
        for index in range(shape[0]):
            for rest in blocks(shape[1:], num_elements):
                yield (slice(index, index + 1), *rest)
        return
    length = max(1, num_elements // max(1, below))
    for begin in range(0, shape[0], length):
        stretch = slice(begin, min(begin + length, shape[0]))
        yield (stretch, *(slice(0, size) for size in shape[1:]))
