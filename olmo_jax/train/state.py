"""What a run carries from step to step, and where each array lives."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from olmo_jax.config.layers import Grid, body_grid
from olmo_jax.config.records import Config
from olmo_jax.mesh.rules import METHODS, REPLICATED, Placed, Spec, layers_spec
from olmo_jax.model.transformer import initialise
from olmo_jax.optim import adamw, skip
from olmo_jax.optim.decay import decay_mask
from olmo_jax.plan.placed import leaves

Leaves = dict[str, Any]
"""Arrays by name, or what describes them: shapes, specs, shardings."""


class State(NamedTuple):
    """All of it is donated to the step.

    `weights` are the resident ones in the compute dtype, none if the method keeps only `main`
    (FSDP). `main` and the moments are FP32.
    `router_bias` is FP32. `step` counts all steps; the moments' count only those that were taken.
    """

    weights: Leaves
    main: Leaves
    moments: Leaves
    router_bias: Leaves
    history: Leaves
    step: Any


@dataclass(frozen=True)
class Layout:
    """Shapes and specs of a config's parameters on a mesh."""

    config: Config
    sizes: Mapping[str, int]

    @cached_property
    def body(self) -> Grid | None:
        """Return where a pipeline has the body's layers, None if there is none."""
        ranks = self.sizes["pipeline"]
        if ranks == 1:
            return None
        return body_grid(self.config.model, ranks, self.config.parallel.pipeline_chunks)

    @cached_property
    def shapes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
        """Return the shapes of (parameters, router biases)."""
        return jax.eval_shape(lambda: initialise(self.config.model, 0, self.body))

    @cached_property
    def placed(self) -> dict[str, Placed]:
        """Return the specs of every parameter.

        Raises: UserError if an axis does not divide its dim.
        """
        return {leaf.name: leaf.placed for leaf in leaves(self.config, self.sizes)}

    @cached_property
    def decay(self) -> dict[str, bool]:
        """Say which parameters decay."""
        return decay_mask(self.shapes[0], self.config.optim.no_decay)

    @property
    def keeps_weights(self) -> bool:
        """Say whether compute weights stay on the device between steps, beside `main`."""
        return METHODS[self.config.parallel.method].keeps_weights

    def resident(self, state: State) -> Leaves:
        """Return what a device keeps of the weights through a step."""
        return state.weights if self.keeps_weights else state.main

    @property
    def dtype(self) -> jnp.dtype:
        """Return the compute dtype."""
        return jnp.dtype(self.config.model.dtype)

    def specs(self) -> State:
        """Return the spec of every array of the state."""
        weights = {name: placed.resident for name, placed in self.placed.items()}
        main = {name: placed.main for name, placed in self.placed.items()}
        return State(
            weights=weights if self.keeps_weights else {},
            main=main,
            moments={"mu": main, "nu": main, "count": REPLICATED},
            router_bias=dict.fromkeys(self.shapes[1], REPLICATED),
            history=dict.fromkeys(skip.init(1), REPLICATED),
            step=REPLICATED,
        )

    def is_staged(self, name: str) -> bool:
        """Say whether a parameter is divided by stages, which no checkpoint is."""
        return self.body is not None and name.startswith("body.")

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter in a checkpoint."""
        shape = self.shapes[0][name].shape
        if self.body is None or not self.is_staged(name):
            return shape
        return (self.body.num_layers, *shape[self.body.layer.ndim :])

    def stored_spec(self, name: str) -> Spec:
        """Return how a parameter lies on the way to and from a checkpoint."""
        spec = self.placed[name].main
        if not self.is_staged(name):
            return spec
        return layers_spec(self.stored_shape(name), spec, self.sizes)


def rebuild(layout: Layout, main: Leaves) -> Leaves:
    """Return the compute weights that follow from `main`: they are never stored."""
    if not layout.keeps_weights:
        return {}
    return {name: leaf.astype(layout.dtype) for name, leaf in main.items()}


def first_state(layout: Layout) -> State:
    """Return the state before the first step; under jit with `specs`, nobody holds a whole leaf."""
    config = layout.config
    main, router_bias = initialise(config.model, config.seed, layout.body)
    return State(
        weights=rebuild(layout, main),
        main=main,
        moments=adamw.init(main),
        router_bias=router_bias,
        history=skip.init(config.optim.skip_window),
        step=jnp.zeros((), jnp.int32),
    )


def partition(specs: Any) -> Any:
    """Return a tree of specs as jax's own."""
    return jax.tree.map(lambda spec: P(*spec), specs, is_leaf=lambda leaf: isinstance(leaf, Spec))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def shardings(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, specs: Any) -> Any:
    """Return a tree of specs as shardings on `mesh`."""
    return jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec), partition(specs), is_leaf=_is_spec
    )
