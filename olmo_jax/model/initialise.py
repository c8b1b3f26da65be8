"""Initial weights: a leaf depends on (seed, name, layer) alone, so every mesh starts alike."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

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
    """Makes the leaves of one block, or of all that `layers` names, stacked along a leading dim.

    `layers` is empty for what belongs to no layer (embedding and head).
    """

    key: Key[Array, ""]
    model: ModelConfig
    prefix: str = ""
    layers: tuple[int, ...] = ()
    stacked: bool = False

    def inside(self, name: str) -> "Initialiser":
        """Return the initialiser of a submodule called `name`."""
        return Initialiser(self.key, self.model, f"{self.prefix}{name}.", self.layers, self.stacked)

    def _values(
        self, name: str, shape: tuple[int, ...], kind: Kind, fan_in: int
    ) -> Float[Array, "layers ..."]:
        """Return the leaf for each layer: one threefry key a layer, whatever is stacked with it."""
        layers = self.layers or (0,)
        if kind in ("ones", "zeros"):
            return jnp.full((len(layers), *shape), float(kind == "ones"), jnp.float32)
        key = jax.random.fold_in(self.key, zlib.crc32(f"{self.prefix}{name}".encode()))
        truncated = not (kind == "embedding" and self.model.init.method != "normal")
        std = jnp.array([standard_deviation(self.model, kind, i, fan_in) for i in layers])
        draw = partial(_sample, shape=shape, truncated=truncated)
        return jax.vmap(draw)(jax.vmap(partial(jax.random.fold_in, key))(jnp.array(layers)), std)

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
        if self.stacked:
            return variable(values, dims=("layers", *dims))
        return variable(values[0], dims=tuple(dims))
