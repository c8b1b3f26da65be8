"""What a config asks for, in a few lines. No jax."""

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from olmo_jax.arch.layers import body_stages, least_padding
from olmo_jax.arch.parameters import active_parameters, parameters, total_parameters
from olmo_jax.config import Config
from olmo_jax.config.messages import listing
from olmo_jax.config.records import OptimConfig
from olmo_jax.formatting import amount
from olmo_jax.mesh.axes import num_devices_wanted, resolve
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.flops import device_model_flops, hardware_flops
from olmo_jax.plan.pass_counts import num_ticks
from olmo_jax.plan.slots import num_slots, peak_live, slot_bytes
from olmo_jax.plan.state_memory import state_memory, whole_when_saved
from olmo_jax.rules import advice, with_mesh, without_effect


def summary(config: Config) -> str:
    """Return parameters, mesh, batch and warnings of a valid config; an open axis is for 8 devices.

    Raises: UserError if the mesh does not fit its devices.
    """
    sizes = resolve(config.mesh, num_devices_wanted(config.mesh))
    lines = ["valid", *facts(Layout(with_mesh(config, sizes), sizes))]
    if -1 in dict(config.mesh).values():
        lines.append(f"  note        an axis of -1 was taken as for {math.prod(sizes.values())}")
    lines += [f"  warning     {text}" for text in warnings(config)]
    return "\n".join(lines)


def warnings(config: Config) -> list[str]:
    """Return a text for each key, and each glob of optim.no_decay, that has no effect.

    What a config does that its author hardly wants comes first.
    """
    names = parameters(config.model)
    return [*advice(config), *without_effect(config)] + [
        f"optim.no_decay has {pattern!r}, which matches no parameter of this model, such as "
        f"{next(reversed(names))!r}; mend it or leave it out"
        for pattern in config.optim.no_decay
        if pattern not in OptimConfig().no_decay
        and not any(fnmatchcase(name, pattern) for name in names)
    ]


def facts(layout: Layout) -> Iterator[str]:
    model, train = layout.model, layout.train
    total, active = total_parameters(model), active_parameters(model)
    yield f"  parameters  {amount(total)}, of which a token meets {amount(active)}"
    yield f"  layers      {model.num_layers}: {layers(layout.config)}"
    used = " x ".join(f"{axis}={size}" for axis, size in layout.sizes.items() if size > 1)
    yield f"  mesh        {layout.num_devices} devices{used and ': '}{used}"
    microbatches = layout.num_microbatches
    tokens = train.global_batch * train.sequence_length
    yield f"  batch       {train.global_batch} x {train.sequence_length} = {tokens:,} tokens a step"
    yield (
        f"  microbatch  {microbatches} a step, each of {train.microbatch} sequence(s) on each of "
        f"{layout.num_data_ranks} data ranks"
    )
    if layout.sizes["pipeline"] > 1:
        yield from pipeline(layout)
    yield f"  run         {train.steps} steps = {amount(train.steps * tokens)} tokens"
    needed, multiplied = (
        sum(part.total for part in count(layout).values())
        for count in (device_model_flops, hardware_flops)
    )
    yield (
        f"  FLOPs       {amount(needed)} model FLOPs a step and device; hardware FLOPs of the CPU "
        f"backends: {multiplied / needed:.2f} times that"
    )
    yield (
        "              (2mkn a product, twice that backward; allowed query-key pairs, top_k "
        "experts; no lookup, no rematerialization)"
    )


def pipeline(layout: Layout) -> Iterator[str]:
    parallel, ranks = layout.config.parallel, layout.sizes["pipeline"]
    chunks = parallel.pipeline_chunks
    ticks = num_ticks(ranks, chunks, layout.num_microbatches)
    yield (
        f"  pipeline    {ranks} ranks x {chunks} chunk(s), {parallel.pipeline_schedule}: "
        f"bubble {ranks - 1}/{ticks} = {100 * (ranks - 1) / ticks:.1f}% of the time"
    )
    first, last = (peak_live(layout, rank) for rank in (0, ranks - 1))
    yield (
        f"              the first rank holds up to {first} chunk activations, the last {last}; "
        f"{num_slots(layout)} slots on each, {amount(slot_bytes(layout))}B in all"
    )
    yield f"              {padding_layers(layout)}"
    whole = whole_when_saved(layout)
    # Gains and biases alone are not worth a line.
    if whole > state_memory(layout).main // 10:
        yield (
            f"              {ranks} divides no width, so every rank holds {amount(whole)}B of the "
            "body while it is saved or restored"
        )


def padding_layers(layout: Layout) -> str:
    """Say how many padding layers a pipeline has, and which chunk counts need fewest."""
    assert layout.stages is not None
    stages, groups = layout.stages, layout.groups
    chunks, ranks, _ = stages.shape
    text = f"{stages.num_padding} of {stages.num_positions} layer positions are padding"
    best = least_padding(len(groups.body), ranks, period=groups.period)
    if not stages.num_padding:
        return text
    if chunks in best:
        return f"{text}, no other chunk count leaves fewer"
    fewest = body_stages(layout.model, ranks, best[0]).num_padding
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
