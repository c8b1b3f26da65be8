"""An optimizer's state, whatever it holds: parts that follow the parameters, and other arrays.

A part follows the parameters if it is a dict with their names: moments do. Each leaf of it must
have its parameter's shape, and is divided as the parameter's main weight is. Everything else, such
as a count of steps, is small and lies on every device.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax


class StateParts(NamedTuple):
    """The parts of a state by their names in it, as `mu`; or `0.mu`, in the first of a chain."""

    parameters: dict[str, dict[str, Any]]
    others: dict[str, Any]


def _follows(names: Set[str]) -> Callable[[Any], bool]:
    return lambda part: isinstance(part, Mapping) and part.keys() == names


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def map_parts(
    opt_state: Any,
    names: Set[str],
    parameters: Callable[[Any], Any],
    others: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Return the state with `parameters` of each part that follows them, and `others` of the rest.

    `names` are those of the parameters.
    """
    follows = _follows(names)
    return jax.tree.map(
        lambda part: parameters(part) if follows(part) else others(part),
        opt_state,
        is_leaf=follows,
    )


def split(opt_state: Any, names: Set[str]) -> StateParts:
    """Return the parts of a state by name; `names` are those of the parameters."""
    follows, parts = _follows(names), StateParts({}, {})
    for path, part in jax.tree.leaves_with_path(opt_state, is_leaf=follows):
        (parts.parameters if follows(part) else parts.others)[_name(path)] = part
    return parts


def join(parts: StateParts, like: Any, names: Set[str]) -> Any:
    """Return the state of these parts; `like` is a state of the same kind."""
    by_name = {**parts.parameters, **parts.others}
    return jax.tree.map_with_path(
        lambda path, _: by_name[_name(path)], like, is_leaf=_follows(names)
    )
