"""Each parameter with its specs, and how much of it one device holds: from a config and a mesh."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from olmo_jax.config.layers import body_grid
from olmo_jax.config.records import Config
from olmo_jax.mesh.rules import STACKED, STAGED, Placed, Spec, axes_used, place
from olmo_jax.plan.parameters import ParameterShape, parameter_shapes


class Leaf(NamedTuple):
    """One parameter: a leaf of the body holds all of a rank's layers, `layers` of them."""

    name: str
    shape: ParameterShape
    placed: Placed
    sizes: Mapping[str, int]

    @property
    def layers(self) -> int:
        leading = zip(self.shape.dims, self.shape.shape, strict=True)
        return math.prod(size for dim, size in leading if dim in ("chunks", "layers"))

    @property
    def is_expert(self) -> bool:
        """Say whether the leaf belongs to the routed experts."""
        return "experts" in self.shape.dims

    @property
    def unit(self) -> str:
        """The unit that reads it: the embedding, the head, or a block; the body's are all alike."""
        parts = self.name.split(".")
        return ".".join(parts[: 2 if parts[0] in ("leading", "trailing") else 1])

    def elements(self, spec: Spec) -> int:
        """Return how many of its elements one device holds when laid out as `spec`."""
        return self.shape.size // parts(axes_used(spec), self.sizes)


def parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Return the number of ranks along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def state_shapes(config: Config, sizes: Mapping[str, int]) -> dict[str, ParameterShape]:
    """Return every parameter as a state holds it: over a pipeline the body's are in stages."""
    shapes = parameter_shapes(config.model)
    if sizes["pipeline"] == 1:
        return shapes
    stages = body_grid(config.model, sizes["pipeline"], config.parallel.pipeline_chunks).layer.shape
    return {
        name: ParameterShape((*stages, *leaf.shape[1:]), (*STAGED, *leaf.dims[1:]))
        if leaf.dims[0] == STACKED
        else leaf
        for name, leaf in shapes.items()
    }


def leaves(config: Config, sizes: Mapping[str, int]) -> list[Leaf]:
    """Return every parameter with its specs on a mesh of these sizes.

    Raises: UserError if an axis does not divide its dim.
    """
    parallel = config.parallel

    def specs(name: str, shape: ParameterShape) -> Placed:
        return place(
            name,
            *shape,
            method=parallel.method,
            shard_optimizer=parallel.shard_optimizer,
            sizes=sizes,
            fold_sequence=parallel.fold_sequence,
        )

    shapes = state_shapes(config, sizes)
    return [Leaf(name, shape, specs(name, shape), sizes) for name, shape in shapes.items()]
