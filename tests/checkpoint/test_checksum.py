"""The two sums of a leaf: no sharding changes them, any changed bit does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from olmo_jax.checkpoint.checksum import Checksum, block_checksum, checksums_of
from olmo_jax.checkpoint.leaves import blocks

LEAF = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)


def text(leaf, start=None) -> str:
    return Checksum(*jax.device_get(block_checksum(jnp.asarray(leaf), start))).text()


def test_the_sums_of_a_leaf_are_those_of_every_version() -> None:
    leaf = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert text(leaf) == "e785f85add780ea8"
    assert text(np.int32(7)) == "a3396f7b4f8a0ae8"


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "expert", "data"), P(("data", "expert")), P("expert")]
)
def test_a_sharding_does_not_change_them(mesh_of, spec: P) -> None:
    mesh = mesh_of(data=4, expert=2)
    placed = jax.device_put(LEAF, NamedSharding(mesh, spec))
    assert checksums_of({"leaf": placed}) == {"leaf": text(LEAF)}


def test_any_flipped_bit_changes_both() -> None:
    first, second = (int(one) for one in block_checksum(jnp.asarray(LEAF)))
    for bit in range(0, LEAF.nbytes * 8, 37):
        flipped = np.frombuffer(LEAF.tobytes(), np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        found = block_checksum(jnp.asarray(flipped.view(np.float32).reshape(LEAF.shape)))
        assert int(found.first) != first
        assert int(found.second) != second


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1)])
def test_elements_that_change_places_change_them(axes) -> None:
    cube = LEAF[:4, :4, :4]
    assert text(cube.transpose(axes)) != text(cube)
    assert text(cube[::-1]) != text(cube)


def test_the_sign_of_zero_and_the_bits_of_a_nan_count() -> None:
    words = [0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000]
    texts = {text(np.array([word], np.uint32).view(np.float32)) for word in words}
    assert len(texts) == len(words)


@pytest.mark.parametrize("num_elements", [1, 5, 24, 60, 1000])
def test_the_sums_of_blocks_add_up(num_elements: int) -> None:
    total = np.zeros(2, np.uint64)
    for block in blocks(LEAF.shape, num_elements):
        start = tuple(part.start for part in block)
        assert LEAF[block].size <= num_elements
        total += np.array(
            jax.device_get(block_checksum(jnp.asarray(LEAF[block]), start)), np.uint64
        )
    assert Checksum(*(total % 2**32)).text() == text(LEAF)


def test_places_past_the_32nd_bit_of_the_index_are_told_apart() -> None:
    row = LEAF[:1, :1]
    # In a leaf of [2^17, 2^16, 4] both begin at the same index modulo 2^32.
    assert text(row, (2**14, 0, 0)) != text(row, (2**14 + 2**15, 0, 0))
    assert text(row, (2**16, 0, 0)) != text(row, (0, 0, 0))
