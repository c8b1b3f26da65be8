"""What a run carries from step to step, and where each array lives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from olmo_jax.mesh.layout import Layout
from olmo_jax.mesh.specs import REPLICATED, Spec
from olmo_jax.model.transformer import initialise
from olmo_jax.optim import skip
from olmo_jax.optim.opt_state import map_parts
from olmo_jax.optim.optimizer import optimizer

Leaves = dict[str, Any]
"""Arrays by name, or what describes them: shapes, specs, shardings."""


class State(NamedTuple):
    """All of it is donated to the step.

    `weights` are the resident ones in the compute dtype, none if the method keeps only `main`
    (FSDP). `main` and `expert_bias` are FP32. `opt_state` is the optimizer's own, whatever it
    holds. `step` counts all steps; what `opt_state` counts are only those that were taken.
    """

    weights: Leaves
    main: Leaves
    opt_state: Any
    expert_bias: Leaves
    history: Leaves
    step: Any


def compute_dtype(layout: Layout) -> jnp.dtype:
    """Return the dtype of forward and backward."""
    return jnp.dtype(layout.model.dtype)


def resident(layout: Layout, state: State) -> Leaves:
    """Return what a device stores of the weights through a step."""
    return state.weights if layout.keeps_weights else state.main


def state_specs(layout: Layout) -> State:
    """Return the spec of every array of the state."""
    weights = {name: specs.resident for name, specs in layout.specs.items()}
    main = {name: specs.main for name, specs in layout.specs.items()}
    return State(
        weights=weights if layout.keeps_weights else {},
        main=main,
        opt_state=map_parts(
            _abstract_opt_state(layout), main.keys(), lambda _: main, lambda _: REPLICATED
        ),
        expert_bias=dict.fromkeys(layout.expert_biases, REPLICATED),
        history=dict.fromkeys(skip.init(1), REPLICATED),
        step=REPLICATED,
    )


def _abstract_opt_state(layout: Layout) -> Any:
    """Return the shapes of the optimizer's state."""
    main = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for name, leaf in layout.parameters.items()
    }
    return jax.eval_shape(optimizer(layout.config.optim).init, main)


def rebuild(layout: Layout, main: Leaves) -> Leaves:
    """Return the compute weights that follow from `main`: they are never stored."""
    if not layout.keeps_weights:
        return {}
    # A cast alone: the caller jits this with the shardings of the result, and GSPMD gathers from
    # the specs of `main` to those of `resident`.
    return {name: leaf.astype(compute_dtype(layout)) for name, leaf in main.items()}


def first_state(layout: Layout) -> State:
    """Return the state before the first step.

    Under jit with `state_specs` no device holds a whole leaf that is divided.
    """
    config = layout.config
    main, expert_bias = initialise(config.model, config.seed, layout.stages)
    return State(
        weights=rebuild(layout, main),
        main=main,
        opt_state=optimizer(config.optim).init(main),
        expert_bias=expert_bias,
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
