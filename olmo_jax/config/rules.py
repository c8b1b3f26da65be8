"""What must hold between keys: checked once, from the config alone, before any device."""

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from olmo_jax.config.layers import LayerPlan, layer_plan
from olmo_jax.config.messages import divisors, listing, show, together
from olmo_jax.config.records import INT32_MAX, Config, MeshConfig, ScheduleConfig
from olmo_jax.config.residuals import NAMES
from olmo_jax.errors import UserError

Rule = Callable[[Config], Iterator[str]]
"""Yields the message of each way in which a config breaks the rule."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes that divide the rows of a batch."""

PIECES = {"ulysses": 1, "ring": 2}
"""How many pieces of a row each `sequence` rank holds, by `parallel.context`."""


def axis_sizes(config: Config) -> Iterator[str]:
    for axis, size in config.mesh:
        if size < 1 and size != -1:
            yield (
                f"mesh.{axis}={size} is not a number of devices; use 1 or more, or -1 for what the "
                "other axes leave"
            )


def one_open_axis(mesh: MeshConfig) -> Iterator[str]:
    free = [f"mesh.{axis}=-1" for axis, size in mesh if size == -1]
    if len(free) > 1:
        yield (
            f"{listing(free, 'and')} leave {len(free)} sizes open, and at most 1 can be "
            "inferred; give the size of the others (1 if unused)"
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
    train, sizes = config.train, [getattr(config.mesh, axis) for axis in BATCH_AXES]
    if any(axis_sizes(config)) or any(experts_divide(config)):
        return
    ranks = math.prod(size for size in sizes if size > 0)
    unit = ranks * train.microbatch
    if train.global_batch % unit == 0:
        return
    axes = " x ".join(
        f"mesh.{axis}={size}" for axis, size in zip(BATCH_AXES, sizes, strict=True) if size > 0
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
    sizes = [size for axis in BATCH_AXES if (size := getattr(config.mesh, axis)) > 0]
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
    if parallel.pipeline_schedule == "v":
        yield (
            "parallel.pipeline_schedule=v cannot be executed: its rows are units of time (a "
            "forward takes 1, a backward 2), and a step runs ticks in which every rank does one "
            "forward and one backward; use interleaved, 1f1b or gpipe"
        )
    if parallel.pipeline_schedule == "1f1b" and parallel.pipeline_chunks > 1:
        yield (
            f"parallel.pipeline_chunks={parallel.pipeline_chunks} does not go with "
            "parallel.pipeline_schedule=1f1b, which runs 1 chunk a rank; use "
            "parallel.pipeline_schedule=interleaved, or parallel.pipeline_chunks=1"
        )
    if parallel.method == "fsdp" and parallel.reshard == "after_backward":
        yield (
            f"parallel.reshard=after_backward does not go with mesh.pipeline={ranks}: a rank has "
            "microbatches in flight throughout the step, so what it keeps until after a backward "
            "it keeps until the end; use parallel.reshard=step for that, or full"
        )


def _with_layers(config: Config, num_layers: int) -> LayerPlan:
    return layer_plan(config.model.model_copy(update={"num_layers": num_layers}))


def pipeline_layers(config: Config) -> Iterator[str]:
    """A stage holds whole periods of the window pattern, and no layer comes after the body."""
    model, ranks, chunks = config.model, config.mesh.pipeline, config.parallel.pipeline_chunks
    if ranks == 1 or any(dense_layers(config)) or any(window_sizes(config)):
        return
    plan = layer_plan(model)
    if plan.trailing:
        numbers = range(max(model.num_dense_layers + 1, model.num_layers - 8), model.num_layers + 9)
        fitting = [n for n in numbers if not _with_layers(config, n).trailing]
        other = f", or model.num_layers={listing(fitting)}" if fitting else ""
        yield (
            f"mesh.pipeline={ranks} has no place for layer {plan.trailing[0]} of "
            f"model.num_layers={model.num_layers}: "
            f"model.windows.pattern={show(model.windows.pattern)} repeats every {plan.period} "
            "layers, and a stage holds whole repeats; use "
            f"model.windows.force_full_last=false{other}"
        )
        return
    periods = len(plan.body) // plan.period
    if ranks > 0 and ranks * chunks > periods:
        yield (
            f"mesh.pipeline={ranks} x parallel.pipeline_chunks={chunks} are {ranks * chunks} "
            f"stages, but the body has {len(plan.body)} layers"
            + (f", {periods} repeats of {plan.period}" if plan.period > 1 else "")
            + "; use "
            + (
                f"parallel.pipeline_chunks={periods // ranks} or less"
                if ranks <= periods
                else f"mesh.pipeline={periods} or less and parallel.pipeline_chunks=1"
            )
        )


def counts_fit(config: Config) -> Iterator[str]:
    """Expert counts of a step are int32."""
    train, slots = config.train, max(config.model.top_k, 1)
    routes = train.global_batch * train.sequence_length * slots
    if routes > INT32_MAX:
        most = INT32_MAX // (train.sequence_length * slots)
        shorter = f"train.sequence_length={INT32_MAX // slots} or less and train.global_batch=1"
        yield (
            f"train.global_batch={train.global_batch} x "
            f"train.sequence_length={train.sequence_length} x model.top_k={slots} are {routes} "
            f"routes a step, more than int32 counts hold ({INT32_MAX}); "
            f"use {f'train.global_batch={most} or less' if most else shorter}"
        )


def dense_layers(config: Config) -> Iterator[str]:
    model = config.model
    dense, layers = model.num_dense_layers, model.num_layers
    if dense > layers:
        yield (
            f"model.num_dense_layers={dense} is above model.num_layers={layers}; use 0 to {layers}"
        )
    elif dense and not model.dense_hidden:
        yield (
            f"model.dense_hidden=0, but {dense} of the layers are dense and need a width; "
            "use 1 or more, or model.num_dense_layers=0"
        )


def routed_layers(config: Config) -> Iterator[str]:
    model = config.model
    if model.num_routed_layers <= 0:
        return
    for key in ("num_experts", "top_k", "expert_hidden"):
        if getattr(model, key) == 0:
            yield (
                f"model.{key}=0, but {model.num_routed_layers} of the layers are routed and need "
                f"1 or more; use 1 or more, or model.num_dense_layers={model.num_layers}"
            )
    if 0 < model.num_experts < model.top_k:
        yield (
            f"model.top_k={model.top_k} is above model.num_experts={model.num_experts}; "
            f"use 1 to {model.num_experts}"
        )


def heads_divide(config: Config) -> Iterator[str]:
    heads, kv_heads = config.model.num_heads, config.model.num_kv_heads
    if heads % kv_heads:
        yield (
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}; "
            f"use {listing(divisors(heads))}"
        )


def partial_that_rotates(num_dims: int, width: int) -> float:
    """Return a share of `width` that is `num_dims` when multiplied and cut: millionths, rounded up.

    The quotient itself may not be: 47 * (6 / 47) and 100 * 0.58 are just below 6 and 58.
    """
    first = math.ceil(num_dims * 1_000_000 / width)
    shares = (millionths / 1_000_000 for millionths in itertools.count(first))
    return next(share for share in shares if int(width * share) >= num_dims)


def _rotated_advice(width: int, partial: float, rotated: int) -> str:
    if partial == 1.0:
        return f"use model.head_dim={listing([n for n in (width - 1, width + 1) if n > 1])}"
    if width == 1:
        return "use model.head_dim=2 and model.rope.partial=1.0"
    pairs = [n for n in (rotated - 1, rotated + 1) if 2 <= n <= width] or [2]
    shares = [show(partial_that_rotates(n, width)) for n in pairs]
    return f"use model.rope.partial={listing(shares)}"


def rotated_dims(config: Config) -> Iterator[str]:
    """Rotary positions turn pairs of dims."""
    width, partial = config.model.head_dim, config.model.rope.partial
    rotated = int(width * partial)
    if rotated < 2 or rotated % 2:
        yield (
            f"model.rope.partial={show(partial)} of model.head_dim={width} rotates {rotated} dims, "
            f"but they turn in pairs, 1 or more; {_rotated_advice(width, partial, rotated)}"
        )


def rope_scaling(config: Config) -> Iterator[str]:
    rope = config.model.rope
    if rope.scaling in ("pi", "stepwise", "yarn") and rope.factor < 1:
        yield (
            f"model.rope.factor={show(rope.factor)} would shorten the context that "
            f"model.rope.scaling={rope.scaling} extends; use 1 or more"
        )
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "stepwise" and low >= high:
        yield (
            f"model.rope.low_frequency_factor={show(low)} is not below "
            f"model.rope.high_frequency_factor={show(high)}; use for instance 1 and 4"
        )
    if rope.scaling == "yarn" and rope.beta_slow >= rope.beta_fast:
        yield (
            f"model.rope.beta_slow={show(rope.beta_slow)} is not below "
            f"model.rope.beta_fast={show(rope.beta_fast)}; use for instance 1 and 32"
        )


def window_sizes(config: Config) -> Iterator[str]:
    pattern = config.model.windows.pattern
    wrong = [window for window in pattern if window < 1 and window != -1]
    if wrong:
        yield (
            f"model.windows.pattern={show(pattern)} has {listing(wrong, 'and')}, which is not "
            "a number of positions; use 1 or more (the position itself counts), or -1 for all"
        )


def groups_together(config: Config) -> Iterator[str]:
    router = config.model.router
    if (router.num_groups is None) == (router.top_groups is None):
        return
    given, missing = ("num_groups", "top_groups")[:: 1 if router.top_groups is None else -1]
    value = getattr(router, given)
    yield (
        f"model.router.{given}={value} is given without model.router.{missing}, and group-limited "
        f"routing needs both; write model.router.{missing}, or set model.router.{given}=null"
    )


def groups_gating(config: Config) -> Iterator[str]:
    """Groups are ranked by sums of scores; topk_softmax selects by raw logits."""
    router = config.model.router
    if router.gating == "topk_softmax" and router.num_groups is not None:
        yield (
            f"model.router.num_groups={router.num_groups} does not go with "
            "model.router.gating=topk_softmax, which selects by logits and not by scores; use "
            "model.router.gating=softmax or sigmoid, or model.router.num_groups=null"
        )


def groups_fit(config: Config) -> Iterator[str]:
    model, router = config.model, config.model.router
    groups, kept, experts = router.num_groups, router.top_groups, model.num_experts
    if groups is None or kept is None or experts == 0 or model.num_routed_layers <= 0:
        return
    if experts % groups:
        yield (
            f"model.router.num_groups={groups} does not divide model.num_experts={experts}; "
            f"use {listing(divisors(experts))}"
        )
    elif kept > groups:
        yield (
            f"model.router.top_groups={kept} is above model.router.num_groups={groups}; "
            f"use 1 to {groups}"
        )
    elif model.top_k > kept * (experts // groups):
        fewest = math.ceil(model.top_k / (experts // groups))
        yield (
            f"model.top_k={model.top_k} is above the {kept * (experts // groups)} experts in "
            f"model.router.top_groups={kept} groups of {experts // groups}; use "
            f"model.top_k={kept * (experts // groups)} or less"
            + (f", or model.router.top_groups={fewest} or more" if fewest <= groups else "")
        )


def _length(count: int | None, fraction: float | None, horizon: int, default: float) -> int:
    """Return a stretch of the schedule in its unit, as optim/schedule.py does."""
    if count is not None:
        return count
    return round(horizon * (default if fraction is None else fraction))


def _horizon(config: Config) -> tuple[int, str]:
    """Return where the schedule ends, and the words for it."""
    schedule, train = config.optim.schedule, config.train
    if schedule.horizon is not None:
        return schedule.horizon, f"optim.schedule.horizon={schedule.horizon}"
    if schedule.unit == "steps":
        return train.steps, f"train.steps={train.steps}"
    tokens = train.steps * train.global_batch * train.sequence_length
    return tokens, f"the {tokens} tokens of train.steps={train.steps}"


def lengths_once(config: Config) -> Iterator[str]:
    schedule = config.optim.schedule
    for key in ("warmup", "decay"):
        count, fraction = getattr(schedule, key), getattr(schedule, f"{key}_fraction")
        if count is not None and fraction is not None:
            yield (
                f"optim.schedule.{key}={count} and optim.schedule.{key}_fraction={show(fraction)} "
                "both give one length; set one of them to null"
            )


def recompute_names(config: Config) -> Iterator[str]:
    names = config.train.recompute
    if isinstance(names, str):
        return
    for name in names:
        if name not in NAMES:
            nearest = difflib.get_close_matches(name, NAMES, n=1)
            hint = f" (the nearest is {nearest[0]})" if nearest else ""
            yield (
                f"train.recompute={show(names)} has {name}, which names no result that can be "
                f"computed again{hint}; use none, block, attention, experts, or a list of "
                f"{listing(tuple(NAMES))}"
            )


def recompute_without_jitter(config: Config) -> Iterator[str]:
    """What is computed again must not depend on draws."""
    jitter, policy = config.model.router.jitter_eps, config.train.recompute
    if jitter is not None and policy != "none" and config.model.num_routed_layers > 0:
        yield (
            f"train.recompute={show(policy)} does not go with "
            f"model.router.jitter_eps={show(jitter)}: a block that draws is not computed twice; "
            "use train.recompute=none, or model.router.jitter_eps=null"
        )


def schedule_parts(config: Config) -> Iterator[str]:
    """What a kind cannot do without."""
    schedule = config.optim.schedule
    if schedule.kind == "composable" and not schedule.stages:
        yield (
            "optim.schedule.kind=composable has no optim.schedule.stages and needs 1 or more; "
            "write optim.schedule.stages=[{duration: 100, end: 1.0}] for instance"
        )
    horizon, _ = _horizon(config)
    warmup = _length(schedule.warmup, schedule.warmup_fraction, horizon, 0.0)
    if schedule.kind == "inverse_sqrt" and warmup == 0:
        yield (
            "optim.schedule.kind=inverse_sqrt falls as sqrt(warmup / count), but its warm-up is 0; "
            "write optim.schedule.warmup=1 or more, or optim.schedule.warmup_fraction=0.1"
        )


def _stretches(schedule: ScheduleConfig, horizon: int) -> tuple[int, int]:
    """Return the lengths of warm-up and decay; linear and cosine decay for one unit at least."""
    warmup = _length(schedule.warmup, schedule.warmup_fraction, horizon, 0.0)
    if schedule.kind != "wsd":
        return warmup, 1
    return warmup, _length(schedule.decay, schedule.decay_fraction, horizon, 0.1)


def schedule_fits(config: Config) -> Iterator[str]:
    """Warm-up and decay end by the horizon."""
    schedule = config.optim.schedule
    if schedule.kind not in ("linear", "cosine", "wsd"):
        return
    horizon, words = _horizon(config)
    warmup, decay = _stretches(schedule, horizon)
    if warmup + decay <= horizon:
        return
    is_fraction = schedule.warmup is None and schedule.warmup_fraction is not None
    given = f"optim.schedule.warmup_fraction={show(schedule.warmup_fraction)} (= {warmup})"
    given = given if is_fraction else f"optim.schedule.warmup={warmup}"
    room = horizon - decay
    shorter = f"a warm-up of {room} or less" if room >= 0 else f"a decay of {horizon} or less"
    yield (
        f"{given} and a decay of {decay} are longer than {words}; "
        f"use {shorter}, or a longer optim.schedule.horizon"
    )


def evaluation_data(config: Config) -> Iterator[str]:
    every, fraction = config.train.eval_every, config.data.eval_fraction
    if every and not fraction:
        yield (
            f"train.eval_every={every} needs held-out documents, but data.eval_fraction=0; "
            "use data.eval_fraction=0.01 for instance, or train.eval_every=0"
        )


def sources(config: Config) -> Iterator[str]:
    if not config.data.sources:
        yield (
            "data.sources=[] names nothing to train on and needs 1 or more; write "
            "data.sources=[{path: DIR}] with a folder that `olmo-jax data tokenize` wrote"
        )


def local_run_dir(config: Config) -> Iterator[str]:
    """A line of metrics is appended at once, which no object store does."""
    if "://" in config.run_dir:
        yield (
            f"run_dir={config.run_dir} is in no file system, and metrics.jsonl and logs grow line "
            "by line, which a bucket cannot; write a folder that all processes see"
        )


RULES: tuple[Rule, ...] = (
    local_run_dir,
    axis_sizes,
    lambda config: one_open_axis(config.mesh),
    experts_divide,
    folded_experts_divide,
    context_heads,
    context_length,
    batch_divides,
    pipeline_groups,
    pipeline_schedule,
    pipeline_layers,
    counts_fit,
    dense_layers,
    routed_layers,
    heads_divide,
    rotated_dims,
    rope_scaling,
    window_sizes,
    groups_together,
    groups_gating,
    groups_fit,
    lengths_once,
    schedule_parts,
    schedule_fits,
    recompute_names,
    recompute_without_jitter,
    evaluation_data,
    sources,
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
