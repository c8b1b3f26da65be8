"""What must hold between the mesh, the methods that use it, and what they divide."""

import math
from collections.abc import Iterator
from typing import Any

from olmo_jax.arch.layers import layer_groups
from olmo_jax.arch.sizes import PIECES
from olmo_jax.config.messages import divisors, listing, show
from olmo_jax.config.records import INT32_MAX, MOST_LAYERS, Config
from olmo_jax.mesh.axes import DENSE_DATA_AXES
from olmo_jax.rules.model import dense_layers, window_sizes


def axis_sizes(config: Config) -> Iterator[str]:
    for axis, size in config.mesh:
        if size < 1 and size != -1:
            yield (
                f"mesh.{axis}={size} is not a number of devices; use 1 or more, or -1 for what the "
                "other axes leave"
            )


def experts_divide(config: Config) -> Iterator[str]:
    experts, axis = config.model.num_experts, config.mesh.expert
    if config.model.num_routed_layers > 0 and axis > 0 and experts > 0 and experts % axis:
        yield (
            f"mesh.expert={axis} does not divide model.num_experts={experts}; "
            f"use {listing(divisors(experts))}"
        )


def folded_experts_divide(config: Config) -> Iterator[str]:
    """With parallel.fold_sequence the ranks of a row divide the experts further."""
    mesh, experts = config.mesh, config.model.num_experts
    ranks, shared = mesh.expert, mesh.sequence
    if not config.parallel.fold_sequence or config.model.num_routed_layers <= 0:
        return
    if min(ranks, shared, experts) < 1 or experts % ranks or experts % (ranks * shared) == 0:
        return
    other = "parallel.fold_sequence=false"
    if experts % shared == 0:
        other = f"mesh.expert={listing(divisors(experts // shared))}, or {other}"
    yield (
        f"mesh.expert={ranks} x mesh.sequence={shared} = {ranks * shared} do not divide "
        f"model.num_experts={experts}, and parallel.fold_sequence=true has them share the experts; "
        f"use {other}"
    )


def context_heads(config: Config) -> Iterator[str]:
    """Under Ulysses each rank attends with whole heads."""
    ranks, heads = config.mesh.sequence, config.model.num_heads
    if config.parallel.context == "ulysses" and ranks > 1 and heads % ranks:
        yield (
            f"mesh.sequence={ranks} does not divide model.num_heads={heads}, and with "
            "parallel.context=ulysses each rank attends with whole heads; "
            f"use {listing(divisors(heads))}, or parallel.context=ring"
        )


def context_length(config: Config) -> Iterator[str]:
    """A rank that holds nothing but padding does nothing."""
    ranks, length, method = config.mesh.sequence, config.train.sequence_length, config.parallel
    each = PIECES[method.context]
    if ranks > 1 and length < ranks * each:
        yield (
            f"train.sequence_length={length} has fewer positions than the {ranks * each} pieces "
            f"that mesh.sequence={ranks} with parallel.context={method.context} cuts a row into; "
            f"use mesh.sequence={max(length // each, 1)} or less, or "
            f"train.sequence_length={ranks * each} or more"
        )


def batch_divides(config: Config) -> Iterator[str]:
    """The global batch is whole microbatches on every data rank; an open axis counts as 1."""
    train, sizes = config.train, [getattr(config.mesh, axis) for axis in DENSE_DATA_AXES]
    if any(axis_sizes(config)) or any(experts_divide(config)):
        return
    ranks = math.prod(size for size in sizes if size > 0)
    unit = ranks * train.microbatch
    if train.global_batch % unit == 0:
        return
    axes = " x ".join(
        f"mesh.{axis}={size}" for axis, size in zip(DENSE_DATA_AXES, sizes, strict=True) if size > 0
    )
    below, above = train.global_batch // unit * unit, (train.global_batch // unit + 1) * unit
    advice = f"use train.global_batch={listing([n for n in (below, above) if 0 < n <= INT32_MAX])}"
    if train.global_batch % ranks == 0:
        advice += f", or train.microbatch={listing(divisors(train.global_batch // ranks))}"
    yield (
        f"train.global_batch={train.global_batch} is not a multiple of {unit} = {axes} x "
        f"train.microbatch={train.microbatch}; {advice}"
    )


def pipeline_groups(config: Config) -> Iterator[str]:
    """Microbatches enter a pipeline in groups, one for each rank; an open axis counts as 1."""
    train, ranks = config.train, config.mesh.pipeline
    sizes = [size for axis in DENSE_DATA_AXES if (size := getattr(config.mesh, axis)) > 0]
    rows = math.prod(sizes) * train.microbatch
    microbatches, rest = divmod(train.global_batch, rows)
    if ranks < 1 or rest or microbatches % ranks == 0:
        return
    fitting = [
        n * rows for n in (microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks)
    ]
    yield (
        f"train.global_batch={train.global_batch} makes {microbatches} microbatches of {rows} "
        f"rows, and they enter the pipeline in groups of mesh.pipeline={ranks}; use "
        f"train.global_batch={listing([n for n in fitting if 0 < n <= INT32_MAX])}"
    )


def pipeline_schedule(config: Config) -> Iterator[str]:
    parallel, ranks = config.parallel, config.mesh.pipeline
    if ranks == 1:
        return
    if parallel.pipeline_schedule == "1f1b" and parallel.pipeline_chunks > 1:
        yield (
            f"parallel.pipeline_chunks={parallel.pipeline_chunks} does not go with "
            "parallel.pipeline_schedule=1f1b, which runs 1 chunk a rank; use "
            "parallel.pipeline_schedule=interleaved, or parallel.pipeline_chunks=1"
        )
    if parallel.method == "fsdp" and parallel.reshard == "after_backward":
        yield (
            "parallel.reshard=after_backward does not go with a pipeline: a rank has "
            "microbatches in flight throughout the step, so what it keeps until after a backward "
            "it keeps until the end; use parallel.reshard=step for that, or full"
        )


def _stages_fit(config: Config, **changed: Any) -> bool:
    """Say whether the body of a changed model is whole stages, with nothing after it."""
    groups = layer_groups(config.model.model_copy(update=changed))
    stages = max(config.mesh.pipeline, 1) * config.parallel.pipeline_chunks
    return not groups.trailing and len(groups.body) >= stages * groups.period


def _up_to(most: int) -> str:
    return "1" if most == 1 else f"1 to {most}"


def _fitting_layers(config: Config) -> str:
    """Return a way out by the number of layers, if one near it fits."""
    model = config.model
    numbers = range(max(model.num_dense_layers + 1, model.num_layers - 8), model.num_layers + 33)
    fitting = [n for n in numbers if n <= MOST_LAYERS and _stages_fit(config, num_layers=n)]
    return f"model.num_layers={listing(fitting[:6])}" if fitting else ""


def pipeline_layers(config: Config) -> Iterator[str]:
    """A stage holds whole periods of the window pattern, and no layer comes after the body."""
    model, ranks, chunks = config.model, config.mesh.pipeline, config.parallel.pipeline_chunks
    if ranks == 1 or any(dense_layers(config)) or any(window_sizes(config)):
        return
    groups = layer_groups(model)
    repeats = len(groups.body) // groups.period
    of_windows = (
        f"model.windows.pattern={show(model.windows.pattern)} repeats every {groups.period} "
        "layers, and a stage holds whole repeats"
    )
    if groups.trailing:
        unforced = model.windows.model_copy(update={"force_full_last": False})
        free = "model.windows.force_full_last=false"
        ways = (
            [free]
            if model.windows.force_full_last and _stages_fit(config, windows=unforced)
            else []
        )
        ways += [way] if (way := _fitting_layers(config)) else []
        yield (
            f"mesh.pipeline={ranks} has no place for layer {groups.trailing[0]} of "
            f"model.num_layers={model.num_layers}: {of_windows}; use "
            f"{', or '.join(ways) or 'mesh.pipeline=1'}"
        )
    elif ranks > 0 and ranks * chunks > repeats:
        few = f"parallel.pipeline_chunks={_up_to(repeats // ranks)}"
        fewer = f"mesh.pipeline={_up_to(repeats)} and parallel.pipeline_chunks=1"
        ways = [few if ranks <= repeats else fewer]
        ways += [way] if (way := _fitting_layers(config)) else []
        has = f"{len(groups.body)} layer{'s' * (len(groups.body) > 1)}"
        yield (
            f"mesh.pipeline={ranks} x parallel.pipeline_chunks={chunks} are {ranks * chunks} "
            f"stages, but the body has {has}"
            + (f" ({of_windows})" if groups.period > 1 else "")
            + f"; use {', or '.join(ways)}"
        )
