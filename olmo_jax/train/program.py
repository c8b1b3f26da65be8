"""The compiled functions of a run: a config and a mesh become a step that arrays go through."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array

from olmo_jax.arch.sizes import padded_length
from olmo_jax.config import Config
from olmo_jax.data.batch import Batch
from olmo_jax.data.sequence_layout import lay_out
from olmo_jax.mesh.axes import resolve
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.mesh.layout import Layout
from olmo_jax.mesh.specs import BATCH, DEVICES, REPLICATED, ROWS, Spec, axes_of_entry
from olmo_jax.model.transformer import check_description
from olmo_jax.optim.opt_state import map_parts
from olmo_jax.parallel.pipeline.stage_exchange import to_layers, to_stages
from olmo_jax.parallel.pipeline.transfers import PIPELINE
from olmo_jax.rules import with_mesh
from olmo_jax.runtime.backend import num_devices
from olmo_jax.train.state import (
    State,
    first_state,
    partition,
    rebuild,
    resident,
    shardings,
    state_specs,
)
from olmo_jax.train.step import Metrics, evaluation_step, train_step

BATCH_SPECS = Batch(BATCH, BATCH, ROWS, BATCH, BATCH, ROWS)
"""Attention on any rank must know the documents of whole rows."""

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""XLA may else leave out roundings to bf16, others when it computes a value again than at first."""


def _put(value: np.ndarray, sharding: NamedSharding) -> Array:
    """Place an array of which every process has the part that it needs."""
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def _map_parameters(state: State, change: Callable[[Any], Any]) -> State:
    """Return the state with `change` of what has the parameters' names, without compute weights."""
    opt_state = map_parts(state.opt_state, state.main.keys(), change)
    return state._replace(weights={}, main=change(state.main), opt_state=opt_state)


@cache
def _jitted_restack(
    way: Callable[..., Any],
    mesh: Mesh,
    stages: tuple[int, int, int],
    num_layers: int,
    staged: Spec,
    layers: Spec,
) -> Any:
    """Return the jitted way of a body's leaf between a state and a checkpoint."""
    # As layers, `pipeline` divides the dim that `layers_spec` found for it, or none.
    taken = [dim for dim, entry in enumerate(layers) if PIPELINE in axes_of_entry(entry)]
    dim = taken[0] if taken else None
    specs = partition((staged, layers) if way is to_layers else (layers, staged))
    moved = partial(way, stages=stages, num_layers=num_layers, dim=dim)
    return jax.jit(jax.shard_map(moved, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))


@dataclass(frozen=True)
class Program:
    """The compiled functions of a config on a mesh. Each compiles when it is first needed.

    On a mesh without devices they can only be traced.
    """

    config: Config
    mesh: Mesh | AbstractMesh

    @property
    def device_mesh(self) -> Mesh:
        """Return the mesh, which has devices."""
        assert isinstance(self.mesh, Mesh)
        return self.mesh

    @cached_property
    def layout(self) -> Layout:
        """Return shapes and specs."""
        return Layout(self.config, dict(self.mesh.shape))

    @cached_property
    def specs(self) -> State:
        """Return the specs of the state."""
        return state_specs(self.layout)

    def init(self) -> State:
        """Return the first state, every leaf made where it lives."""
        make = jax.jit(
            partial(first_state, self.layout), out_shardings=shardings(self.mesh, self.specs)
        )
        return make()

    def rebuild(self, main: dict[str, Array]) -> dict[str, Array]:
        """Return the compute weights that follow from FP32 main weights laid out as `main`."""
        make = jax.jit(
            partial(rebuild, self.layout), out_shardings=shardings(self.mesh, self.specs.weights)
        )
        return make(main)

    def stored(self, state: State) -> State:
        """Return a state as a checkpoint has it: no compute weights, the body's layers in one dim.

        Comm: under a pipeline an all-to-all of each of the body's leaves.
        """
        return _map_parameters(state, lambda leaves: self._restack(to_layers, dict(leaves)))

    def restored(self, state: State) -> State:
        """Return the state of one as a checkpoint has it, compute weights rebuilt.

        Takes the leaves out of `state`, so that at no time all are there twice.
        """
        state = _map_parameters(state, self.staged)
        return state._replace(weights=self.rebuild(state.main))

    def staged(self, leaves: dict[str, Array]) -> dict[str, Array]:
        """Return parameters as this program lays them out; takes them out of `leaves`."""
        return self._restack(to_stages, leaves)

    def _restack(self, way: Callable[..., Any], leaves: dict[str, Array]) -> dict[str, Array]:
        layout = self.layout
        moved = {}
        for name in list(leaves):
            leaf = leaves.pop(name)
            moved[name] = self._moved(way, name)(leaf) if layout.is_staged(name) else leaf
        return moved

    def _moved(self, way: Callable[..., Any], name: str) -> Any:
        specs = self.layout.specs[name].main, self.layout.stored_spec(name)
        stages = self.layout.stages
        assert stages is not None
        return _jitted_restack(way, self.mesh, stages.shape, stages.num_layers, *specs)

    def abstract_stored(self) -> State:
        """Return shapes and shardings of a state as a checkpoint has it."""
        layout = self.layout

        def stored(leaves: dict[str, Any]) -> dict[str, Any]:
            return {
                name: jax.ShapeDtypeStruct(
                    layout.stored_shape(name),
                    leaf.dtype,
                    sharding=NamedSharding(self.mesh, partition(layout.stored_spec(name))),
                )
                for name, leaf in leaves.items()
            }

        return _map_parameters(self.abstract_arguments()[0], stored)

    @cached_property
    def _own_rows(self) -> list[int]:
        """Return the rows of a microbatch that this process's devices hold, ascending."""
        num_rows = self.config.train.microbatch * self.layout.num_data_ranks
        sharding = NamedSharding(self.mesh, partition(ROWS))
        held = sharding.addressable_devices_indices_map((1, num_rows)).values()
        return sorted({i for index in held if index for i in range(num_rows)[index[1]]})

    @property
    def rows(self) -> list[int]:
        """Return the rows of the global batch that this process reads, ascending."""
        per_microbatch = self.config.train.microbatch * self.layout.num_data_ranks
        starts = range(0, self.config.train.global_batch, per_microbatch)
        return [start + row for start in starts for row in self._own_rows]

    def put(self, batch: Batch) -> Batch:
        """Cut `rows` of a global batch into microbatches and put them on the devices."""
        per_microbatch, own = (
            self.config.train.microbatch * self.layout.num_data_ranks,
            self._own_rows,
        )
        batch = lay_out(batch, self.config.parallel.context, self.mesh.shape["sequence"])

        def put(value: Any, sharding: Any) -> Array:
            value = np.asarray(value)
            split = value.reshape(-1, len(own), *value.shape[1:])

            def part(index: Any) -> np.ndarray:
                # A device asks for rows of the global microbatch; this process has read `own` of
                # them. With own rows 4 to 7, rows 6:8 of a device are 2:4 of what was read.
                microbatches, rows, *positions = index
                held = range(per_microbatch)[rows]
                begin = own.index(held[0])
                return split[(microbatches, slice(begin, begin + len(held)), *positions)]

            shape = (len(split), per_microbatch, *value.shape[1:])
            return jax.make_array_from_callback(shape, sharding, part)

        return Batch(*map(put, batch, shardings(self.mesh, BATCH_SPECS)))

    @cached_property
    def jitted(self) -> Any:
        """Return the jitted step of (state, batch, lr, stop); the state is donated."""
        mapped = jax.shard_map(
            partial(train_step, self.layout),
            mesh=self.mesh,
            in_specs=partition((self.specs, BATCH_SPECS, REPLICATED, DEVICES)),
            out_specs=partition((self.specs, REPLICATED)),
        )
        return jax.jit(mapped, donate_argnums=0, compiler_options=COMPILER_OPTIONS)

    def abstract_arguments(self) -> tuple[State, Batch, Any, Any]:
        """Return shapes and shardings of the step's arguments: what lowering needs, no data."""
        train = self.config.train
        state = jax.eval_shape(partial(first_state, self.layout))
        shape = (self.layout.num_microbatches, train.microbatch * self.layout.num_data_ranks)
        context, num_ranks = self.config.parallel.context, self.mesh.shape["sequence"]
        length = padded_length(train.sequence_length, context, num_ranks)
        long = jax.ShapeDtypeStruct((*shape, length), jnp.int32)
        mask = jax.ShapeDtypeStruct(long.shape, jnp.bool_)
        rows = jax.ShapeDtypeStruct(shape, jnp.int32)
        batch = Batch(long, long, long, long, mask, rows)
        lr = jax.ShapeDtypeStruct((), jnp.float32)
        stop = jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32)
        specs = (self.specs, BATCH_SPECS, REPLICATED, DEVICES)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            (state, batch, lr, stop),
            shardings(self.mesh, specs),
        )

    @cached_property
    def compiled(self) -> Any:
        """Return the compiled step."""
        return self.jitted.lower(*self.abstract_arguments()).compile()

    def compile(self, *, evaluation: bool = False) -> None:
        """Compile the step now, and the evaluation if it will be asked for."""
        _ = self.compiled
        if evaluation:
            _ = self._evaluation

    def step(
        self, state: State, batch: Batch, lr: float, stop: bool = False
    ) -> tuple[State, Metrics]:
        """Dispatch one step; `state` is given away. `lr` is this step's learning rate."""
        given = np.array(lr, np.float32), np.full(self.mesh.size, int(stop), np.int32)
        targets = shardings(self.mesh, (REPLICATED, DEVICES))
        return self.compiled(state, batch, *map(_put, given, targets))

    @cached_property
    def _evaluation(self) -> Any:
        mapped = jax.shard_map(
            partial(evaluation_step, self.layout),
            mesh=self.mesh,
            in_specs=partition(
                (resident(self.layout, self.specs), self.specs.expert_bias, BATCH_SPECS)
            ),
            out_specs=partition(REPLICATED),
        )
        state, batch, *_ = self.abstract_arguments()
        weights = resident(self.layout, state)
        jitted = jax.jit(mapped, compiler_options=COMPILER_OPTIONS)
        return jitted.lower(weights, state.expert_bias, batch).compile()

    def evaluate(self, state: State, batch: Batch) -> Metrics:
        """Return `ce_sum` and `loss_tokens` of a batch on the devices; the state is only read."""
        return self._evaluation(resident(self.layout, state), state.expert_bias, batch)


def build(config: Config, mesh: Mesh | AbstractMesh) -> Program:
    """Return the program of a config on a mesh. Nothing compiles yet.

    Raises: UserError if a parameter cannot be laid out.
    """
    program = Program(config, mesh)
    _ = program.layout.specs
    check_description(config.model)
    return program


def build_here(config: Config) -> Program:
    """Return the program of a config on this job's devices, its open mesh axis filled in.

    Raises: UserError if the mesh does not fit the devices, or the config the mesh.
    """
    mesh = build_mesh(resolve(config.mesh, num_devices()))
    return build(with_mesh(config, mesh.shape), mesh)
