"""What moves along `pipeline`: between stages, and between the body and both ends of the model."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

PIPELINE = "pipeline"


def send_on(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Send an activation to the next rank, the last one's to the first; return what arrives.

    Comm: a permute along `pipeline` of x in its dtype.
    """
    ranks = lax.axis_size(PIPELINE)
    with jax.named_scope("send_activation"):
        return lax.ppermute(x, PIPELINE, [(rank, (rank + 1) % ranks) for rank in range(ranks)])


def send_back(gradient: Float[Array, "..."]) -> Float[Array, "..."]:
    """Send the gradient of a stage's input to the rank before; return what arrives.

    Comm: a permute along `pipeline` of the gradient in its dtype.
    """
    ranks = lax.axis_size(PIPELINE)
    with jax.named_scope("send_gradient"):
        return lax.ppermute(
            gradient, PIPELINE, [((rank + 1) % ranks, rank) for rank in range(ranks)]
        )


def share_out(
    value: Float[Array, "R ..."], mine: Bool[Array, ""], *, scope: str
) -> Float[Array, "r ..."]:
    """Divide the rows of the rank whose `mine` is true over all ranks, whatever the others hold.

    Exact in any dtype: all other addends are zero.
    Comm: a reduce-scatter along `pipeline` of `value` in its dtype.
    """
    with jax.named_scope(scope):
        # JAX has no scatter from one rank. A select, since a product would turn NaN * 0 into NaN.
        held = jnp.where(mine, value, jnp.zeros_like(value))
        return lax.psum_scatter(held, PIPELINE, scatter_dimension=0, tiled=True)


def join(value: Float[Array, "r ..."], *, scope: str) -> Float[Array, "R ..."]:
    """Return the rows of all ranks, in rank order.

    Comm: an all-gather along `pipeline` of `value` in its dtype.
    """
    with jax.named_scope(scope):
        return lax.all_gather(value, PIPELINE, axis=0, tiled=True)
