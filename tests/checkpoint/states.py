"""States without training: random bits on any mesh, and what is compared of them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from olmo_jax.checkpoint.leaves import Key, flat, nested, stored, unstored
from olmo_jax.config.records import Config, ModelConfig, RouterConfig
from olmo_jax.train.program import Program
from tests.cases import tiny

SMALL = ModelConfig(
    num_layers=2,
    d_model=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    num_experts=4,
    expert_hidden=6,
    shared_hidden=4,
    dense_hidden=12,
    vocab_size=17,
    dtype="float32",
    router=RouterConfig(bias_gamma=0.01),
)
_INFINITY = np.uint32(0x7F800000)
FACTS = {"data": "d1", "tokenizer": "t1"}


def small(**changed: Any) -> Config:
    """Return a config of one device whose leaves are a few numbers each."""
    model = SMALL.model_copy(update=changed)
    return tiny({}).model_copy(update={"model": model})


def random_state(program: Program, seed: int = 0) -> Any:
    """Return a state of random bits: numbers of all sizes and negative zeros among them.

    In the history, which may hold them, also NaNs.
    """
    like = program.abstract_stored()
    draw = np.random.default_rng(seed)
    leaves = {key: _put(_random(draw, key, leaf), leaf) for key, leaf in flat(stored(like)).items()}
    tree = nested(leaves)
    return program.restored(unstored(tree, like))


def _random(draw: np.random.Generator, key: Key, leaf: Any) -> np.ndarray:
    if key.name == "size":
        return np.array(3, leaf.dtype)
    bits = draw.integers(0, 2**32, leaf.shape, np.uint32)
    if key.role != "history":
        bits[(bits & _INFINITY) == _INFINITY] ^= 0x40000000
    bits.flat[0] = 0x80000000
    return bits.view(leaf.dtype)


def _put(value: np.ndarray, leaf: Any) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, value.__getitem__)


def bits_of(state: Any) -> dict[Key, bytes]:
    """Return the bits of every leaf that is stored, with its shape and dtype."""
    return {
        key: np.asarray(leaf).tobytes() + f" {leaf.dtype}{leaf.shape}".encode()
        for key, leaf in flat(stored(state)).items()
    }


def assert_same_bits(found: Any, wanted: Any) -> None:
    """Compare two states' stored leaves."""
    assert differing(bits_of(found), bits_of(wanted)) == []


def differing(found: Mapping[Key, bytes], wanted: Mapping[Key, bytes]) -> list[str]:
    """Return the leaves that differ, or that only one of the two has."""
    return [str(key) for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
