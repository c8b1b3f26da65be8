"""Initial weights: a leaf depends on (seed, name, layer) alone, so every mesh starts alike."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from olmo_jax.arch.layers import PADDING_LAYER
from olmo_jax.arch.parameters import Parameter, standard_deviation
from olmo_jax.config.records import ModelConfig


class ExpertBias(nnx.Variable):
    """The bias of a router's choice: FP32, moved by the balance rule and by no optimizer."""


def _sample(
    key: Key[Array, ""], std: Float[Array, ""], shape: tuple[int, ...], *, truncated: bool
) -> Float[Array, "..."]:
    if truncated:
        return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)
    return std * jax.random.normal(key, shape, jnp.float32)


@dataclass(frozen=True)
class Initialiser:
    """Makes the leaves that `described` has, of one block or of many stacked along leading `dims`.

    `layers` are their numbers, shaped like these dims; no number belongs to no layer (embedding and
    head). Where one is `PADDING_LAYER` there are zeros.
    """

    key: Key[Array, ""]
    model: ModelConfig
    described: Mapping[str, Parameter]
    prefix: str = ""
    layers: Int[np.ndarray, "..."] = field(default_factory=lambda: np.array(0))
    dims: tuple[str, ...] = ()

    def inside(self, name: str) -> "Initialiser":
        """Return the initialiser of a submodule called `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        """Say whether the model has a parameter, or a submodule with one, of this name."""
        path = f"{self.prefix}{name}"
        return any(known == path or known.startswith(f"{path}.") for known in self.described)

    def _values(self, path: str, parameter: Parameter) -> Float[Array, "*stacked_and_shape"]:
        """Return the leaf for each layer: one threefry key a layer, whatever is stacked with it."""
        # seed -> name -> layer: one key a layer, however many are stacked, on whichever rank. vmap
        # gives each layer the numbers that it would draw alone. crc32, since Python's hash of a
        # string differs from process to process.
        key = jax.random.fold_in(self.key, zlib.crc32(path.encode()))
        shape, init = parameter.shape, parameter.init
        truncated = not (init == "embedding" and self.model.init.method != "normal")

        def draw(layer: Array, std: Array) -> Float[Array, "..."]:
            if init in ("ones", "zeros"):
                return jnp.full(shape, float(init == "ones"), jnp.float32)
            return _sample(jax.random.fold_in(key, layer), std, shape, truncated=truncated)

        for _ in self.dims:
            draw = jax.vmap(draw)
        numbers = np.maximum(self.layers, 0)
        fan_in = parameter.fan_in
        stds = [standard_deviation(self.model, init, int(i), fan_in) for i in numbers.flat]
        values = draw(jnp.asarray(numbers), jnp.array(stds).reshape(numbers.shape))
        if (self.layers != PADDING_LAYER).all():
            return values
        is_layer = np.expand_dims(self.layers != PADDING_LAYER, tuple(range(-len(shape), 0)))
        return jnp.where(is_layer, values, 0)

    def __call__(self, name: str) -> nnx.Variable:
        """Return the float32 leaf `name`.

        Raises: ValueError if the description of the model has no such parameter.
        """
        path = f"{self.prefix}{name}"
        if path not in self.described:
            raise ValueError(
                f"a module makes the parameter {path}, which the description of the model has not "
                f"({len(self.described)} parameters of this unit); add its shape, dims and "
                "initialiser to olmo_jax/arch/parameters.py"
            )
        parameter = self.described[path]
        variable = nnx.Param if parameter.trained else ExpertBias
        return variable(self._values(path, parameter))

    def optional(self, name: str) -> nnx.Variable | None:
        """Return the leaf `name`, or None if the model has none."""
        return self(name) if self.has(name) else None
