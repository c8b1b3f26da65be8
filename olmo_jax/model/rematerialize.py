"""What a unit saves for its backward pass, by name; it rematerializes the rest.

Every product, attention, transfer and choice of the model names its result with `checkpoint_name`.
What has no name (norms, activations, rotations, casts) is cheap and always rematerialized. Nothing
derived from a weight alone is saved, but for a gathered weight where the reshard policy says so.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive


def _is_saved(saved: frozenset[str], primitive: Primitive, *_: Any, **params: Any) -> bool:
    if primitive.name == "name":
        return params["name"] in saved
    # cuDNN's attention has residuals of its own, which nobody can name from outside.
    return "dot_product_attention_fwd" in primitive.name and "attention" in saved


def save_only(
    saved: Iterable[str], function: Callable[..., Any], *, scanned: bool = False
) -> Callable[..., Any]:
    """Wrap a unit's function so that backward has its arguments and what `saved` names.

    Outside a loop a barrier keeps XLA from merging the second computation with the first. XLA:CPU
    drops barriers before it merges: there a unit outside the loop over layers is computed once.
    """
    # Unscanned, both computations of a value stand in one program with equal operands, and XLA's
    # elimination of common subexpressions would turn the second into the first, saved after all.
    policy = partial(_is_saved, frozenset(saved))
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)
