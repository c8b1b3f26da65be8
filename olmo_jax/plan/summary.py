"""What a config asks for, in a few lines. No jax."""

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from olmo_jax.config import Config, with_mesh, without_effect
from olmo_jax.config.layers import body_grid, layer_plan, least_waste
from olmo_jax.config.messages import listing
from olmo_jax.config.records import OptimConfig
from olmo_jax.mesh.axes import DENSE_DATA_AXES, num_devices_wanted, resolve
from olmo_jax.plan.flops import step_flops
from olmo_jax.plan.memory import memory, whole_when_saved
from olmo_jax.plan.parameters import active_parameters, parameter_shapes, total_parameters
from olmo_jax.plan.passes import num_ticks
from olmo_jax.plan.residuals import num_slots, peak_live, slot_bytes
from olmo_jax.plan.static_sizes import num_microbatches


def amount(number: int | float) -> str:
    """Return "1.25 M": three digits and a power of a thousand."""
    for size, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:g}"


def summary(config: Config) -> str:
    """Return parameters, mesh, batch and warnings of a valid config; an open axis is for 8 devices.

    Raises: UserError if the mesh does not fit its devices.
    """
    sizes = resolve(config.mesh, num_devices_wanted(config.mesh))
    lines = ["valid", *facts(with_mesh(config, sizes), sizes)]
    if -1 in dict(config.mesh).values():
        lines.append(f"  note        an axis of -1 was taken as for {math.prod(sizes.values())}")
    lines += [f"  warning     {text}" for text in warnings(config)]
    return "\n".join(lines)


def warnings(config: Config) -> list[str]:
    """Return a text for each key, and each glob of optim.no_decay, that has no effect."""
    names = parameter_shapes(config.model)
    return without_effect(config) + [
        f"optim.no_decay has {pattern!r}, which matches no parameter of this model, such as "
        f"{next(reversed(names))!r}; mend it or leave it out"
        for pattern in config.optim.no_decay
        if pattern not in OptimConfig().no_decay
        and not any(fnmatchcase(name, pattern) for name in names)
    ]


def facts(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    model, train = config.model, config.train
    total, active = total_parameters(model), active_parameters(model)
    yield f"  parameters  {amount(total)}, of which a token meets {amount(active)}"
    yield f"  layers      {model.num_layers}: {layers(config)}"
    used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    yield f"  mesh        {math.prod(sizes.values())} devices{used and ': '}{used}"
    ranks = math.prod(sizes[axis] for axis in DENSE_DATA_AXES)
    microbatches = num_microbatches(train, sizes)
    tokens = train.global_batch * train.sequence_length
    yield f"  batch       {train.global_batch} x {train.sequence_length} = {tokens:,} tokens a step"
    yield (
        f"  microbatch  {microbatches} a step, each of {train.microbatch} sequence(s) on each of "
        f"{ranks} data ranks"
    )
    if sizes["pipeline"] > 1:
        yield from pipeline(config, sizes)
    yield f"  run         {train.steps} steps = {amount(train.steps * tokens)} tokens"
    useful, executed = (
        sum(part.total for part in step_flops(config, sizes, executed=executed).values())
        for executed in (False, True)
    )
    yield (
        f"  FLOPs       {amount(useful)} useful a step and device, {executed / useful:.2f} times "
        "that executed by the CPU backends"
    )
    yield (
        "              (2mkn a product, twice that backward; allowed query-key pairs, top_k "
        "experts; no lookup, no recompute)"
    )


def pipeline(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    ranks, chunks = sizes["pipeline"], config.parallel.pipeline_chunks
    ticks = num_ticks(ranks, chunks, num_microbatches(config.train, sizes))
    yield (
        f"  pipeline    {ranks} ranks x {chunks} chunk(s), {config.parallel.pipeline_schedule}: "
        f"bubble {ranks - 1}/{ticks} = {100 * (ranks - 1) / ticks:.1f}% of the time"
    )
    first, last = (peak_live(config, sizes, rank) for rank in (0, ranks - 1))
    yield (
        f"              the first rank holds up to {first} chunk activations, the last {last}; "
        f"{num_slots(config, sizes)} slots on each, {amount(slot_bytes(config, sizes))}B in all"
    )
    yield f"              {empty_places(config, ranks)}"
    whole = whole_when_saved(config, sizes)
    # Gains and biases alone are not worth a line.
    if whole > memory(config, sizes).main // 10:
        yield (
            f"              {ranks} divides no width, so every rank holds {amount(whole)}B of the "
            "body while it is saved or restored"
        )


def empty_places(config: Config, ranks: int) -> str:
    """Say how many places of a pipeline have no layer, and which chunk counts leave fewest."""
    chunks, plan = config.parallel.pipeline_chunks, layer_plan(config.model)
    grid = body_grid(config.model, ranks, chunks)
    text = f"{grid.waste} of {grid.num_places} layer places are empty"
    best = least_waste(len(plan.body), ranks, period=plan.period)
    if not grid.waste:
        return text
    if chunks in best:
        return f"{text}, no other chunk count leaves fewer"
    fewest = body_grid(config.model, ranks, best[0]).waste
    return f"{text}; parallel.pipeline_chunks={listing(best)} leaves fewest, {fewest}"


def layers(config: Config) -> str:
    model = config.model
    if model.num_routed_layers == 0:
        return "all dense"
    shared = ", a shared expert" if model.shared_hidden else ""
    return (
        f"{model.num_dense_layers} dense, {model.num_routed_layers} routed "
        f"({model.num_experts} experts, {model.top_k} a token{shared})"
    )
