"""Which single change of a config would make it fit, and what it costs."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from olmo_jax.config import Config
from olmo_jax.config.messages import divisors
from olmo_jax.errors import UserError
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.hardware import Hardware
from olmo_jax.plan.plan import Plan
from olmo_jax.rules.validation import violations


class Alternative(NamedTuple):
    """A change as overrides, and the plan that it makes."""

    overrides: str
    plan: Plan


def changed(config: Config, sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the config with some keys of its sections replaced; unchecked."""
    updates = {
        name: getattr(config, name).model_copy(update=dict(keys)) for name, keys in sections.items()
    }
    return config.model_copy(update=updates)


def _single(config: Config) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield changes of one thing: memory for time, smaller pieces, or ranks used otherwise."""
    mesh, train, parallel = config.mesh, config.train, config.parallel
    for policy in ("attention", "experts", "block"):
        if train.recompute not in (policy, "block"):
            yield {"train": {"recompute": policy}}
    for size in divisors(train.microbatch):
        if size < train.microbatch:
            yield {"train": {"microbatch": size}}
    if not parallel.shard_optimizer:
        yield {"parallel": {"shard_optimizer": True}}
    # Ranks of `data` turned into ranks of another axis: the number of devices stays.
    for axis in ("expert", "pipeline"):
        for factor in divisors(mesh.data):
            if factor > 1:
                size = getattr(mesh, axis) * factor
                yield {"mesh": {axis: size, "data": mesh.data // factor}}
    if parallel.method == "ddp" and mesh.data > 1:
        sharded = {"fsdp": mesh.fsdp * mesh.data, "data": 1}
        yield {"parallel": {"method": "fsdp"}, "mesh": sharded}


def overrides(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the change as the command line takes it."""
    return " ".join(
        f"{name}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for name, keys in sections.items()
        for key, value in keys.items()
    )


def that_fit(config: Config, hardware: Hardware) -> list[Alternative]:
    """Return the single changes with which the config fits, the fastest step first."""
    found = []
    for sections in _single(config):
        other = changed(config, sections)
        if violations(other):
            continue
        plan = Plan(Layout(other, dict(other.mesh)), hardware)
        try:
            if plan.fits:
                found.append(Alternative(overrides(sections), plan))
        except UserError:
            continue
    return sorted(found, key=lambda change: change.plan.step_time_s)
