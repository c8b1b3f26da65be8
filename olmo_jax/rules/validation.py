"""What must hold between keys: checked once, from the config alone, before any device.

The rules of the mesh, the model and the run have a file each; all of them are in `RULES`.
"""

from collections.abc import Callable, Iterator, Mapping

from olmo_jax.config.messages import together
from olmo_jax.config.records import Config
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import open_axes
from olmo_jax.rules import mesh, model, run

Rule = Callable[[Config], Iterator[str]]
"""Yields the message of each way in which a config breaks the rule."""


RULES: tuple[Rule, ...] = (
    run.local_run_dir,
    mesh.axis_sizes,
    lambda config: open_axes(config.mesh),
    mesh.experts_divide,
    mesh.folded_experts_divide,
    mesh.context_heads,
    mesh.context_length,
    mesh.batch_divides,
    mesh.pipeline_groups,
    mesh.pipeline_schedule,
    mesh.pipeline_layers,
    run.counts_fit,
    model.dense_layers,
    model.routed_layers,
    model.heads_divide,
    model.rotated_dims,
    model.rope_scaling,
    model.window_sizes,
    model.groups_together,
    model.groups_gating,
    model.groups_fit,
    run.lengths_once,
    run.schedule_parts,
    run.schedule_fits,
    run.recompute_names,
    run.recompute_without_jitter,
    run.evaluation_data,
    run.sources,
)


def violations(config: Config) -> list[str]:
    """Return the message of every rule that `config` breaks."""
    return [message for rule in RULES for message in rule(config)]


def validate(config: Config) -> Config:
    """Return `config` if it keeps every rule.

    Raises: UserError that lists all violations.
    """
    if found := violations(config):
        raise UserError(together(found))
    return config


def with_mesh(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return `config` with its mesh resolved to `sizes`, checked again: no axis is open any more.

    Raises: UserError that lists all violations.
    """
    mesh = config.mesh.model_copy(update=dict(sizes))
    return validate(config.model_copy(update={"mesh": mesh}))
