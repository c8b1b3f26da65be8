"""What must hold between the keys of a run: batch, schedule, recomputation, data."""

import difflib
from collections import Counter
from collections.abc import Iterator

from olmo_jax.arch.activations import NAMES
from olmo_jax.config.messages import listing, show
from olmo_jax.config.records import INT32_MAX, Config, ScheduleConfig
from olmo_jax.file_names import PATTERN_SIGNS


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


def _horizon(config: Config) -> tuple[int, str]:
    """Return where the schedule ends, and the words for it."""
    schedule, train = config.optim.schedule, config.train
    tokens = train.steps * train.global_batch * train.sequence_length
    end = schedule.end(total_steps=train.steps, total_tokens=tokens)
    if schedule.horizon is not None:
        return end, f"optim.schedule.horizon={end}"
    steps = f"train.steps={train.steps}"
    return end, steps if schedule.unit == "steps" else f"the {end} tokens of {steps}"


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
    warmup = schedule.warmup_length(horizon)
    if schedule.kind == "inverse_sqrt" and warmup == 0:
        yield (
            "optim.schedule.kind=inverse_sqrt falls as sqrt(warmup / count), but its warm-up is 0; "
            "write optim.schedule.warmup=1 or more, or optim.schedule.warmup_fraction=0.1"
        )


def _stretches(schedule: ScheduleConfig, horizon: int) -> tuple[int, int]:
    """Return the lengths of warm-up and decay; linear and cosine decay for one unit at least."""
    warmup = schedule.warmup_length(horizon)
    if schedule.kind != "wsd":
        return warmup, 1
    return warmup, schedule.decay_length(horizon)


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
    times = Counter(source.path for source in config.data.sources)
    for path, number in times.items():
        if number > 1:
            yield (
                f"data.sources names {path} {number} times; tokens are named once, or batches hold "
                "their rows as often; name it once, with the sum of the weights"
            )


def local_run_dir(config: Config) -> Iterator[str]:
    """A line of metrics is appended at once, which no object store does."""
    if "://" in config.run_dir:
        yield (
            f"run_dir={config.run_dir} is in no file system, and metrics.jsonl and logs grow line "
            "by line, which a bucket cannot; write a folder that all processes see"
        )
    if found := [sign for sign in PATTERN_SIGNS if sign in config.run_dir]:
        yield (
            f"run_dir={config.run_dir} has {' '.join(found)}, and {' '.join(PATTERN_SIGNS)} in a "
            "path are a pattern of several for Orbax; write a run_dir without"
        )
