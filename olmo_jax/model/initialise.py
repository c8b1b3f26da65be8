"""Initial weights: a leaf depends on (seed, name, layer) alone, so every mesh starts alike."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from olmo_jax.config.layers import EMPTY
from olmo_jax.config.records import ModelConfig

Kind = Literal[
    "embedding",
    "attention_in",
    "attention_out",
    "router",
    "routed_in",
    "routed_out",
    "shared",
    "head",
    "ones",
    "zeros",
]


class RouterBias(nnx.Variable):
    """The selection bias of a router: FP32, moved by the balance rule and by no optimizer."""


def standard_deviation(model: ModelConfig, kind: Kind, layer: int, fan_in: int) -> float:
    """Return the sigma of a leaf's initial values.

    Source: olmo_core 3.0.0, nn/transformer/init.py and OLMoDDPModel.init_weights.
    """
    std, method = model.init.std, model.init.method
    if kind == "embedding":
        normal = model.init.embedding_std or std
        fan = 1.0 / model.embedding_multiplier
        return {"normal": normal, "llama": 1.0, "llama_depth": 1.0, "fan_in": fan}[method]
    if kind == "head":
        return std if method == "normal" else model.d_model**-0.5
    if method == "fan_in":
        # The reference has no fan-in rule for the shared expert, and a dense block's MLP is one.
        return std if kind == "shared" else fan_in**-0.5
    if kind == "attention_in" or method == "normal":
        return std
    return std / math.sqrt(2 * (model.num_layers if method == "llama" else layer + 1))


def _sample(
    key: Key[Array, ""], std: Float[Array, ""], shape: tuple[int, ...], *, truncated: bool
) -> Float[Array, "..."]:
    if truncated:
        return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)
    return std * jax.random.normal(key, shape, jnp.float32)


@dataclass(frozen=True)
class Initialiser:
    """Makes the leaves of one block, or of many that are stacked along leading `dims`.

    `layers` are their numbers, shaped like these dims; no number belongs to no layer (embedding and
    head). Where one is `EMPTY` there are zeros.
    """

    key: Key[Array, ""]
    model: ModelConfig
    prefix: str = ""
    layers: Int[np.ndarray, "..."] = field(default_factory=lambda: np.array(0))
    dims: tuple[str, ...] = ()

    def inside(self, name: str) -> "Initialiser":
        """Return the initialiser of a submodule called `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def _values(
        self, name: str, shape: tuple[int, ...], kind: Kind, fan_in: int
    ) -> Float[Array, "*stacked_and_shape"]:
        """Return the leaf for each layer: one threefry key a layer, whatever is stacked with it."""
        key = jax.random.fold_in(self.key, zlib.crc32(f"{self.prefix}{name}".encode()))
        truncated = not (kind == "embedding" and self.model.init.method != "normal")

        def draw(layer: Array, std: Array) -> Float[Array, "..."]:
            if kind in ("ones", "zeros"):
                return jnp.full(shape, float(kind == "ones"), jnp.float32)
            return _sample(jax.random.fold_in(key, layer), std, shape, truncated=truncated)

        for _ in self.dims:
            draw = jax.vmap(draw)
        numbers = np.maximum(self.layers, 0)
        stds = [standard_deviation(self.model, kind, int(i), fan_in) for i in numbers.flat]
        values = draw(jnp.asarray(numbers), jnp.array(stds).reshape(numbers.shape))
        if (self.layers != EMPTY).all():
            return values
        there = np.expand_dims(self.layers != EMPTY, tuple(range(-len(shape), 0)))
        return jnp.where(there, values, 0)

    def __call__(
        self,
        name: str,
        shape: Sequence[int],
        dims: Sequence[str],
        kind: Kind,
        *,
        fan_in: int = 1,
        variable: type[nnx.Variable] = nnx.Param,
    ) -> nnx.Variable:
        """Return the float32 leaf `name`, its logical dims kept as metadata `dims`."""
        values = self._values(name, tuple(shape), kind, fan_in)
        return variable(values, dims=(*self.dims, *dims))
