"""A config on a mesh of known sizes: each device's share, the specs of parameters. No jax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from olmo_jax.arch.activations import DeviceSizes
from olmo_jax.arch.layers import LayerGroups, StageLayout, body_stages, layer_groups
from olmo_jax.arch.parameters import (
    STACKED,
    STAGED,
    Parameter,
    Parameters,
    expert_biases,
    parameters,
)
from olmo_jax.arch.sizes import capacity, padded_length, received_rows
from olmo_jax.config.records import Config, ModelConfig, TrainConfig
from olmo_jax.mesh.axes import DENSE_DATA_AXES, num_expert_ranks
from olmo_jax.mesh.specs import (
    METHODS,
    ParameterSpecs,
    Spec,
    axes_used,
    layers_spec,
    num_shards,
    parameter_specs,
)


class ShardedParameter(NamedTuple):
    """One parameter with its specs: a leaf of the body holds all of a rank's layers."""

    name: str
    parameter: Parameter
    specs: ParameterSpecs
    sizes: Mapping[str, int]

    @property
    def num_layers(self) -> int:
        """Return how many layers of one rank the leaf holds; 1 outside of the body."""
        dims = zip(self.parameter.dims, self.parameter.shape, strict=True)
        return math.prod(size for dim, size in dims if dim in ("chunks", STACKED))

    @property
    def is_expert(self) -> bool:
        """Say whether the leaf belongs to the routed experts."""
        return "experts" in self.parameter.dims

    @property
    def unit(self) -> str:
        """The unit that reads it: the embedding, the head, or a block; the body's are all alike."""
        parts = self.name.split(".")
        return ".".join(parts[: 2 if parts[0] in ("leading", "trailing") else 1])

    def elements(self, spec: Spec) -> int:
        """Return how many of its elements one device holds when laid out as `spec`."""
        return self.parameter.size // num_shards(axes_used(spec), self.sizes)


def num_microbatches(train: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Return the microbatches of one step, each of `train.microbatch` sequences a data rank."""
    return train.global_batch // (train.microbatch * num_shards(DENSE_DATA_AXES, sizes))


@dataclass(frozen=True)
class Layout:
    """A config, and the size of every mesh axis; all that follows from the two alone."""

    config: Config
    sizes: Mapping[str, int]

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_data_ranks(self) -> int:
        """Return the ranks that rows are divided over."""
        return num_shards(DENSE_DATA_AXES, self.sizes)

    @property
    def num_microbatches(self) -> int:
        return num_microbatches(self.train, self.sizes)

    @property
    def num_expert_ranks(self) -> int:
        """Return the ranks that hold one copy of the experts between them."""
        return num_expert_ranks(self.sizes, fold_sequence=self.config.parallel.fold_sequence)

    @property
    def positions(self) -> int:
        """Return the positions that one device has of a row, padding to equal pieces included."""
        ranks, length = self.sizes["sequence"], self.train.sequence_length
        return padded_length(length, self.config.parallel.context, ranks) // ranks

    @property
    def microbatch_tokens(self) -> int:
        """Return the tokens that one device has of a microbatch."""
        return self.train.microbatch * self.positions

    @cached_property
    def device(self) -> DeviceSizes:
        """Return one device's share of a microbatch."""
        parallel, ranks = self.config.parallel, self.num_expert_ranks
        tokens, top_k = self.microbatch_tokens, self.model.top_k
        limit = capacity(parallel.capacity_factor, tokens, top_k)
        return DeviceSizes(
            rows=self.train.microbatch,
            positions=self.positions,
            sequence_ranks=self.sizes["sequence"],
            context=parallel.context,
            expert_ranks=ranks,
            received_rows=received_rows(tokens, top_k, ranks, limit),
        )

    @cached_property
    def groups(self) -> LayerGroups:
        """Return which layers are scanned together."""
        return layer_groups(self.model)

    @cached_property
    def stages(self) -> StageLayout | None:
        """Return which stage of the pipeline holds each layer; None without a pipeline."""
        ranks = self.sizes["pipeline"]
        if ranks == 1:
            return None
        return body_stages(self.model, ranks, self.config.parallel.pipeline_chunks)

    @cached_property
    def parameters(self) -> Parameters:
        """Return every trained parameter as a state holds it: under a pipeline, in stages."""
        found = parameters(self.model)
        if self.stages is None:
            return found
        stages = self.stages.shape
        return {
            name: leaf._replace(shape=(*stages, *leaf.shape[1:]), dims=(*STAGED, *leaf.dims[1:]))
            if leaf.dims[0] == STACKED
            else leaf
            for name, leaf in found.items()
        }

    @cached_property
    def expert_biases(self) -> Parameters:
        """Return the routers' expert biases, which no mesh divides."""
        return expert_biases(self.model)

    @cached_property
    def specs(self) -> dict[str, ParameterSpecs]:
        """Return the specs of every trained parameter.

        Raises: UserError if an axis does not divide its dim.
        """
        parallel = self.config.parallel
        return {
            name: parameter_specs(
                name,
                leaf,
                method=parallel.method,
                shard_optimizer=parallel.shard_optimizer,
                sizes=self.sizes,
                fold_sequence=parallel.fold_sequence,
            )
            for name, leaf in self.parameters.items()
        }

    @cached_property
    def sharded(self) -> list[ShardedParameter]:
        """Return every trained parameter with its specs.

        Raises: UserError if an axis does not divide its dim.
        """
        return [
            ShardedParameter(name, leaf, self.specs[name], self.sizes)
            for name, leaf in self.parameters.items()
        ]

    @property
    def keeps_weights(self) -> bool:
        """Say whether compute weights stay on the device between steps, beside the main ones."""
        return METHODS[self.config.parallel.method].keeps_weights

    def is_staged(self, name: str) -> bool:
        """Say whether a parameter is divided by stages, which no checkpoint is."""
        return self.stages is not None and name.startswith("body.")

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter in a checkpoint."""
        shape = self.parameters[name].shape
        if self.stages is None or not self.is_staged(name):
            return shape
        return (self.stages.num_layers, *shape[len(STAGED) :])

    def stored_spec(self, name: str) -> Spec:
        """Return how a parameter lies on the way to and from a checkpoint."""
        spec = self.specs[name].main
        if not self.is_staged(name):
            return spec
        return layers_spec(self.stored_shape(name), spec, self.sizes)
