"""What a block keeps for its backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

_CHEAP = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "reduce_precision",
        "reshape",
        "squeeze",
        "transpose",
    }
)


def _is_worth_keeping(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """Refuse what only copies, and what is derived from a weight alone: the weight is at hand."""
    return primitive.name not in _CHEAP and params.get("name") != "weight"


def keep_all_but_weights(block: Callable[..., Any]) -> Callable[..., Any]:
    """Keep every intermediate except copies of weights and changes of dtype or shape.

    Without it the scan over layers would store each layer's cast weights a second time.
    """
    # In a scan the barrier against common subexpressions is not needed.
    return jax.checkpoint(block, policy=_is_worth_keeping, prevent_cse=False)
