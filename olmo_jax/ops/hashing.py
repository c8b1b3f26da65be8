"""Counter-based random numbers: a value depends on its coordinates, never on the mesh."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped, UInt32

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio; `mix` leaves zero as it is
_MANTISSA_BITS = 24


def mix(x: UInt32[Array, "*dims"]) -> UInt32[Array, "*dims"]:
    """Scramble 32 bits so that each input bit flips each output bit half of the time.

    Source: A. Appleby, MurmurHash3 (finaliser); C. Wellons, hash-prospector (lowbias32 constants).
    """
    # A bijection: x ^ (x >> n) can be undone from the top bits down, and so can a product with an
    # odd number modulo 2^32.
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def bits(
    seed: int | Int[Array, ""], *coordinates: int | Shaped[Array, "..."]
) -> UInt32[Array, "..."]:
    """Hash the seed and integer coordinates, folded one after another, into 32 random bits.

    Shapes: the coordinates broadcast against each other; the result has their common shape.
    """
    # Without the offset a coordinate equal to the seed would cancel it.
    state = mix(_as_word(seed) + jnp.uint32(_GOLDEN))
    for coordinate in coordinates:
        state = mix(state ^ mix(_as_word(coordinate)))
    return mix(state ^ jnp.uint32(_GOLDEN))


def uniform(
    seed: int | Int[Array, ""], *coordinates: int | Shaped[Array, "..."]
) -> Float[Array, "..."]:
    """Return float32 values in [0, 1) that are a function of the seed and the coordinates alone."""
    # float32 has 24 bits of mantissa: with more of them a value could be rounded up to 1.
    top = bits(seed, *coordinates) >> jnp.uint32(32 - _MANTISSA_BITS)
    return top.astype(jnp.float32) * jnp.float32(2.0**-_MANTISSA_BITS)


def _as_word(value: int | Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    if isinstance(value, int):
        return jnp.uint32(value & _WORD)
    return value.astype(jnp.uint32)
