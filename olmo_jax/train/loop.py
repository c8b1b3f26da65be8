"""A run from a config to a folder: the only place where training reads clocks and writes files."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from olmo_jax.checkpoint import weights
from olmo_jax.config import Config
from olmo_jax.data.batch import Batch
from olmo_jax.data.corpus import Corpus, corpus_of
from olmo_jax.launch.stop import StopSignal
from olmo_jax.mesh.devices import device_table, expert_group_warning
from olmo_jax.optim.schedule import learning_rate
from olmo_jax.plan.flops import flops_per_token
from olmo_jax.train import run_folder
from olmo_jax.train.metrics import Line, MetricsFile, evaluation_of, line_of
from olmo_jax.train.program import Program, build_here
from olmo_jax.train.progress import (
    StepProgress,
    duration,
    in_background,
    open_console,
    say,
    waiting,
)
from olmo_jax.train.report import draw
from olmo_jax.train.state import State


class Upcoming(NamedTuple):
    """A step before its dispatch; `tokens` is the running total of real positions with its own."""

    step: int
    batch: Batch
    tokens: int
    lr: float


class Pending(NamedTuple):
    """A dispatched step; its values may not be there yet."""

    step: int
    tokens: int
    lr: float
    values: Mapping[str, Any]


@dataclass
class Recorder:
    """Turns pending steps into lines of the metrics file and of the display."""

    config: Config
    file: MetricsFile
    progress: StepProgress
    lines: list[Line] = field(default_factory=list)
    _last: float = field(default_factory=time.perf_counter)

    def finish(
        self, pending: Pending, evaluate: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    ) -> bool:
        """Wait for a step and its evaluation, write its line, and say whether a stop was asked."""
        values = jax.device_get(pending.values)
        step_time_s = time.perf_counter() - self._last
        parts = jax.device_get(list(evaluate())) if evaluate else []
        line = line_of(
            values,
            step=pending.step,
            tokens=pending.tokens,
            lr=pending.lr,
            step_time_s=step_time_s,
            assignment=self.config.model.router.assignment,
            evaluation=evaluation_of(parts) if parts else None,
        )
        self.file.write(line)
        self.progress.show(line)
        self.lines.append(line)
        # After the evaluation: its time is no step's.
        self._last = time.perf_counter()
        return bool(values["stop"])


def train(config: Config) -> None:
    """Train as `config` says and leave the run folder; return early when a signal asks for it.

    Raises: UserError for what is wrong with files, devices or the run folder, before compilation.
    """
    console = open_console()
    run_folder.refuse_used(Path(config.run_dir))
    corpus = corpus_of(config)
    program = build_here(config)
    config, mesh = program.config, program.mesh
    held_out = held_out_batches(config, corpus, program)
    run_dir = run_folder.create(config, device_table(mesh), corpus.tokenizer_path)
    introduce(console, program)

    started = time.perf_counter()
    with waiting(console, "compiling the step"):
        in_background(partial(program.compile, evaluation=bool(held_out)))
        state = program.init()
    say(console, f"compiled in {duration(time.perf_counter() - started)}")

    started = time.perf_counter()
    # Open until the weights are written: a signal that comes then must not cost the run.
    with StopSignal() as stop:
        with (
            MetricsFile(run_dir / run_folder.METRICS) as file,
            StepProgress(console, config.train.steps) as progress,
        ):
            recorder = Recorder(config, file, progress)
            state = run_steps(program, state, upcoming(config, corpus), held_out, recorder, stop)
        seconds = time.perf_counter() - started
        write_results(console, run_dir, recorder.lines, state)
    for text in summary(config, recorder.lines, seconds, run_dir):
        say(console, text)


def held_out_batches(config: Config, corpus: Corpus, program: Program) -> list[Batch]:
    """Return the evaluation batches on the devices; none if no document is held out."""
    if config.data.eval_fraction == 0:
        return []
    found = corpus.held_out(config.train.global_batch, config.train.eval_batches)
    return [program.place(batch) for batch in found]


def introduce(console: Console, program: Program) -> None:
    """Say on which devices, and in what pieces, the run goes."""
    mesh, config = program.mesh, program.config
    device = mesh.devices.flat[0]
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    if device.platform == "cpu":
        say(console, f"no GPU is used: {mesh.size} CPU device(s) are emulated")
    say(console, f"mesh {sizes or 'of one device'}, {program.num_microbatches} microbatches a step")
    if mesh.size <= 16:
        say(console, device_table(mesh))
    else:
        say(console, f"{mesh.size} devices ({device.device_kind}), see {run_folder.DEVICES}")
    if warning := expert_group_warning(mesh):
        say(console, f"warning: {warning}")
    if config.model.router.assignment != "learned":
        say(console, f"routing is not learned: assignment={config.model.router.assignment}")


def upcoming(config: Config, corpus: Corpus) -> Iterator[Upcoming]:
    """Yield every step with its batch and learning rate, in order."""
    train = config.train
    total_tokens = train.steps * train.global_batch * train.sequence_length
    rate = partial(learning_rate, config.optim, total_steps=train.steps, total_tokens=total_tokens)
    tokens = 0
    batches = corpus.batches(0, train.global_batch, range(train.global_batch))
    for step, batch in zip(range(1, train.steps + 1), batches, strict=False):
        tokens += int(batch.real.sum())
        yield Upcoming(step, batch, tokens, rate(step=step, tokens=tokens))


def run_steps(
    program: Program,
    state: State,
    steps: Iterator[Upcoming],
    held_out: Sequence[Batch],
    recorder: Recorder,
    stop: StopSignal,
) -> State:
    """Dispatch each step, then read the one before it, so that devices never wait for the host.

    A stop that this process was asked for goes into the next step and comes back from it as a
    maximum over all devices: every process then leaves after the same step. An evaluation waits
    for its step, so that neither is charged for the other.
    """
    pending, told = None, False
    for step, batch, tokens, lr in steps:
        state, values = program.step(state, program.place(batch), lr, stop.requested)
        if pending is not None:
            told = recorder.finish(pending)
        pending = Pending(step, tokens, lr, values)
        # With one process there is nobody to agree with.
        alone_and_asked = stop.requested and jax.process_count() == 1
        if held_out and evaluation_due(program.config, step) and not alone_and_asked:
            told |= recorder.finish(pending, partial(evaluate, program, state, held_out, stop))
            pending = None
        if told or alone_and_asked:
            break
    if pending is not None:
        recorder.finish(pending)
    return state


def evaluate(
    program: Program, state: State, held_out: Sequence[Batch], stop: StopSignal
) -> list[Mapping[str, Any]]:
    """Return each held-out batch's values; none if a lone process is asked to stop meanwhile.

    One batch at a time: XLA:CPU deadlocks when dozens of programs with collectives are queued.
    """
    parts = []
    for batch in held_out:
        parts.append(jax.device_get(program.evaluate(state, batch)))
        if stop.requested and jax.process_count() == 1:
            return []
    return parts


def evaluation_due(config: Config, step: int) -> bool:
    """Say whether an evaluation follows `step`: every `train.eval_every` steps and at the end."""
    every = config.train.eval_every
    return step == config.train.steps or (every > 0 and step % every == 0)


def write_results(console: Console, run_dir: Path, lines: Sequence[Line], state: State) -> None:
    """Write the final weights and the picture."""
    with waiting(console, "writing weights and report"):
        weights.save(run_dir, lines[-1]["step"], {**state.main, **state.router_bias})
        draw(lines, run_dir / run_folder.REPORT)


def summary(config: Config, lines: Sequence[Line], seconds: float, run_dir: Path) -> Iterator[str]:
    """Yield the few lines that a run ends with."""
    first, last = lines[0], lines[-1]
    early = last["step"] < config.train.steps
    ended = (
        f"stopped after step {last['step']} of {config.train.steps}"
        if early
        else (f"trained {last['step']} steps")
    )
    yield f"\n{ended}: {last['tokens']:,} tokens in {duration(seconds)}"
    held_out = f", eval {last['eval_loss']:.4f}" if "eval_loss" in last else ""
    yield f"  loss    {first['loss']:.4f} -> {last['loss']:.4f}{held_out}"
    yield f"  speed   {speed(config, lines)}"
    if skipped := sum(line["skipped"] for line in lines):
        yield f"  skipped {skipped} steps"
    yield f"  written {run_dir}: {', '.join(run_folder.contents(run_dir))}"


def speed(config: Config, lines: Sequence[Line]) -> str:
    """Return tokens and useful FLOPs per second, without the first step."""
    timed = lines[1:] or lines
    tokens = sum(line["tokens_per_s"] * line["step_time_s"] for line in timed)
    rate = tokens / sum(line["step_time_s"] for line in timed)
    flops = rate * flops_per_token(config.model, config.train.sequence_length)
    unit, name = (1e12, "TFLOP/s") if flops >= 1e11 else (1e9, "GFLOP/s")
    return f"{rate:,.0f} tokens/s, {flops / unit:,.1f} useful {name}"
