"""What tells one flipped bit: two sums over a leaf that no sharding changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Shaped, UInt32

from olmo_jax.ops.hashing import mix

_SALTS = (0x243F6A88, 0x85A308D3)  # digits of pi; any two different numbers do
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: what sets the dims apart


class Checksum(NamedTuple):
    """Both sums modulo 2^32 of a leaf, or of a block of it: the sums of its blocks add up."""

    first: Any
    second: Any

    def text(self) -> str:
        """Return both as hexadecimal digits."""
        return f"{int(self.first):08x}{int(self.second):08x}"


def _words(leaf: Shaped[jax.Array, "*dims"]) -> UInt32[jax.Array, "*dims"]:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _key(salt: int, start: UInt32[jax.Array, " rank"], shape: tuple[int, ...]) -> jax.Array:
    """Return a random word for each element, out of one a coordinate: no index exceeds 32 bits."""
    # key[i, j] = salt + mix(a + i) + mix(b + j), a and b from the salt and the dim. A flat index
    # would pass 2^32 for large leaves, and a block would need the shape of its leaf.
    key = jnp.full((1,) * len(shape), salt, jnp.uint32)
    for dim, size in enumerate(shape):
        offset = start[dim] + jnp.uint32((salt + dim * _GOLDEN) & 0xFFFFFFFF)
        others = [other for other in range(len(shape)) if other != dim]
        key += jnp.expand_dims(mix(offset + jnp.arange(size, dtype=jnp.uint32)), others)
    return key


@jax.jit
def _examined(
    leaf: Shaped[jax.Array, "*dims"], start: UInt32[jax.Array, " rank"]
) -> tuple[Checksum, jax.Array]:
    """Return a leaf's sums and whether all of it is finite, in one pass over it."""
    # word -> word ^ key -> mix is a bijection for each element: if one element changes, so does its
    # addend, and the sum. Addition modulo 2^32 has no order, so any sharding gives the same sum.
    words = _words(leaf)
    sums = Checksum(
        *(jnp.sum(mix(words ^ _key(salt, start, leaf.shape)), dtype=jnp.uint32) for salt in _SALTS)
    )
    return sums, jnp.isfinite(leaf).all()


def block_checksum(
    leaf: Shaped[jax.Array, "*dims"], start: tuple[int, ...] | None = None
) -> Checksum:
    """Return the sums of a leaf, or of the block of it that begins at `start`, on its devices.

    Each element's bits and index go through a bijection of 32 bits, so that one changed element
    always changes both sums, and any other change goes unseen once in 2^64.

    Comm: two psums of 4 bytes, made by GSPMD where the leaf is sharded.
    """
    start = (0,) * leaf.ndim if start is None else start
    return _examined(leaf, jnp.array(start, jnp.uint32))[0]


def examined(leaves: dict[Any, jax.Array]) -> tuple[dict[Any, str], list[Any]]:
    """Return each leaf's sums as text, and which leaves hold a number that is not finite.

    All are asked for before the first is waited for.

    Comm: that of `block_checksum`, and an all-reduce of one bool.
    """
    asked = {
        name: _examined(leaf, jnp.zeros(leaf.ndim, jnp.uint32)) for name, leaf in leaves.items()
    }
    found = jax.device_get(asked)
    texts = {name: Checksum(*sums).text() for name, (sums, _) in found.items()}
    return texts, [name for name, (_, finite) in found.items() if not finite]


def checksums_of(leaves: dict[Any, jax.Array]) -> dict[Any, str]:
    """Return each leaf's sums as text."""
    return examined(leaves)[0]
