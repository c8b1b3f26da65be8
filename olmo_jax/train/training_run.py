"""A run from a config to a folder: what comes before the first step and after the last."""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from olmo_jax.arch.flops import flops_per_token
from olmo_jax.checkpoint import (
    RUN_ID,
    Checkpoints,
    Position,
    Saved,
    initial_weights,
    read_saved,
    refuse_in_the_way,
    refuse_start,
    source_of_weights,
)
from olmo_jax.config import Config
from olmo_jax.config.messages import listing
from olmo_jax.data.batch import Batch
from olmo_jax.data.corpus import Corpus, corpus_of
from olmo_jax.formatting import duration
from olmo_jax.mesh.devices import device_table, expert_group_warning
from olmo_jax.optim.opt_state import map_parts
from olmo_jax.runtime.barrier import barrier
from olmo_jax.runtime.first_process import from_first, is_first
from olmo_jax.runtime.garbage import Garbage
from olmo_jax.runtime.stop_signal import StopSignal
from olmo_jax.runtime.watchdog import Watchdog
from olmo_jax.train import horizon, resume_checks, run_folder
from olmo_jax.train.curves import draw
from olmo_jax.train.loop import CheckpointSaver, Recorder, Session, run_steps, upcoming
from olmo_jax.train.metrics import Line, MetricsFile, read, truncate
from olmo_jax.train.program import Program, build_here
from olmo_jax.train.progress import (
    StepProgress,
    in_background,
    open_console,
    say,
    waiting,
)
from olmo_jax.train.run_id import identify
from olmo_jax.train.state import State
from olmo_jax.train.trace import Trace

START = Position(step=0, sequences=0, tokens=0)


@dataclass(frozen=True)
class Run:
    """A run before its next step: what it computes, reads and writes, and where it stands.

    `begun` is the horizon of its schedule when it began.
    """

    console: Console
    checkpoints: Checkpoints
    program: Program
    corpus: Corpus
    held_out: Sequence[Batch]
    facts: dict[str, str]
    position: Position
    begun: horizon.Horizon

    @property
    def config(self) -> Config:
        return self.program.config

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def say(self, text: str) -> None:
        say(self.console, text)


def train(config: Config, allowed: Collection[str] = ()) -> None:
    """Train as `config` says, from the run folder's last checkpoint on, and leave the run folder.

    It returns early when a signal asks for it. `allowed` names what may differ from the checkpoint
    although it changes the run, out of `resume_policy.ALLOWABLE`.

    Raises: UserError for what is wrong with files, devices, the run folder or what was changed,
    before compilation; later for a checkpoint that cannot be read or written, and bad steps.
    """
    console = open_console()
    console.quiet = not is_first()
    run_dir = Path(config.run_dir)
    run_folder.refuse_foreign(run_dir)
    # The lock first: from here nothing in the folder changes but by this run.
    with (
        held(config) as lock,
        Checkpoints(
            run_dir,
            config.checkpoint,
            refuse_lost=lock.refuse_lost,
            tell=partial(say, console),
        ) as checkpoints,
    ):
        checkpoints.name_foreign()
        earlier = last_checkpoint(checkpoints, config)
        if earlier is not None:
            resume_checks.refuse_config(earlier, config, allowed)
            if earlier.position.step >= config.train.steps:
                say_finished(console, run_dir, earlier.position.step, config.train.steps)
                return
        from_first(
            "folders of checkpoints to come",
            partial(room_ahead, config, 0 if earlier is None else earlier.position.step),
            config.train.first_step_timeout_s,
        )
        run = prepared(console, checkpoints, config, earlier, allowed)
        # Nobody else writes here now, and nothing refuses the run any more.
        from_first("clean folder", partial(clean, checkpoints), config.train.first_step_timeout_s)
        carry_out(run)


@contextmanager
def held(config: Config) -> Iterator[run_folder.Lock]:
    """Keep every other run out of the run folder, from the first process for all: its lock.

    Raises: UserError if another run is in it.
    """
    lock = run_folder.Lock(Path(config.run_dir))
    try:
        from_first("lock of the run folder", lock.take, config.train.first_step_timeout_s)
        yield lock
    finally:
        lock.free()


def room_ahead(config: Config, done: int) -> str:
    """Refuse what lies where this run will write, before its steps and not at a save."""
    refuse_in_the_way(config.run_dir, done, config.train.steps)
    return ""


def clean(checkpoints: Checkpoints) -> str:
    """Remove the checkpoints that writers left unfinished that were killed."""
    checkpoints.clean()
    return ""


def last_checkpoint(checkpoints: Checkpoints, config: Config) -> Saved | None:
    """Return what the last whole checkpoint of a run says of itself, if there is one.

    The first process chooses: the others may see the folder as it was a moment ago.
    """
    step = from_first(
        "last checkpoint",
        lambda: str(max(checkpoints.steps(), default="")),
        config.train.first_step_timeout_s,
    )
    return read_saved(config.run_dir, int(step)) if step else None


def say_finished(console: Console, run_dir: Path, step: int, steps: int) -> None:
    """Say that nothing is left to do, and draw the picture if the run was killed before it did."""
    metrics, report = run_dir / run_folder.METRICS, run_dir / run_folder.REPORT
    if is_first() and not report.exists() and metrics.exists():
        truncate_metrics(console, metrics, step)
        if lines := read(metrics):
            draw(lines, report)
    say(
        console,
        f"{run_dir} has reached step {step} of train.steps={steps} already; to continue, write a "
        "larger train.steps",
    )


def prepared(
    console: Console,
    checkpoints: Checkpoints,
    config: Config,
    earlier: Saved | None,
    allowed: Collection[str],
) -> Run:
    """Open what a run reads, write what is known before its steps, and say what will be done.

    Raises: UserError as `train` does before compilation.
    """
    corpus = corpus_of(config)
    facts = resume_checks.facts_of(corpus)
    other = [] if earlier is None else resume_checks.refuse_facts(earlier, facts, allowed)
    program = build_here(config)
    started = refuse_start(program, facts, allowed) if earlier is None else []
    held_out = held_out_batches(corpus, program)
    table = device_table(program.device_mesh)
    # Reading all that took a while.
    checkpoints.refuse_lost()
    from_first(
        "run folder",
        lambda: str(run_folder.create(program.config, table, corpus.tokenizer_path)),
        config.train.first_step_timeout_s,
    )
    run_id = from_first(
        "run id",
        partial(identify, Path(config.run_dir)),
        config.train.first_step_timeout_s,
    )
    introduce(console, program)
    for text in started:
        say(console, f"allowed: another than that of {text}")
    before = source_of_weights(config, facts) if earlier is None else earlier
    if earlier is None:
        for text in resume_checks.seen(config, before):
            say(console, text)
    else:
        for text in resume_checks.said(earlier, program.config, other):
            say(console, text)
    position = earlier.position if earlier else START
    begun = horizon.first(program.config, earlier)
    known = {**facts, resume_checks.HELD_OUT: repr(resume_checks.never_seen(config, before))}
    if run_id:
        known[RUN_ID] = run_id
    return Run(console, checkpoints, program, corpus, held_out, known, position, begun)


def held_out_batches(corpus: Corpus, program: Program) -> list[Batch]:
    """Return the evaluation batches on the devices; none if no document is held out."""
    train = program.config.train
    if program.config.data.eval_fraction == 0:
        return []
    found = corpus.held_out(train.global_batch, train.eval_batches, program.rows)
    return [program.put(batch) for batch in found]


def introduce(console: Console, program: Program) -> None:
    """Say on which devices, and in what pieces, the run goes."""
    mesh, config = program.device_mesh, program.config
    device = mesh.devices.flat[0]
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    if device.platform == "cpu":
        say(console, f"no GPU is used: {mesh.size} CPU device(s) are emulated")
    say(
        console,
        f"mesh {sizes or 'of one device'}, {program.layout.num_microbatches} microbatches a step",
    )
    if mesh.size <= 16:
        say(console, device_table(mesh))
    else:
        say(console, f"{mesh.size} devices ({device.device_kind}), see {run_folder.DEVICE_TABLE}")
    if warning := expert_group_warning(mesh):
        say(console, f"warning: {warning}")
    if config.model.router.assignment != "learned":
        say(console, f"routing is not learned: assignment={config.model.router.assignment}")


def carry_out(run: Run) -> None:
    """Compile, take the steps that are left, and write checkpoint, picture and summary."""
    train, metrics = run.config.train, run.run_dir / run_folder.METRICS
    limits = (train.first_step_timeout_s, train.step_timeout_s)
    with Watchdog(run.run_dir, jax.process_index(), jax.process_count(), *limits) as watchdog:
        state = state_before(run, watchdog)
        # Compiling took a while.
        run.checkpoints.refuse_lost()
        from_first(
            "metrics", lambda: truncate_metrics(run.console, metrics, run.position.step), limits[0]
        )
        started = time.perf_counter()
        # Open until the checkpoint is written: a signal that comes then must not cost the run.
        with StopSignal() as stop:
            recorder = take_steps(run, state, stop, watchdog)
            watchdog.phase("writing the checkpoint")
            with waiting(run.console, "writing report and checkpoint"):
                run.checkpoints.refuse_lost()
                if is_first():
                    draw(read(metrics), run.run_dir / run_folder.REPORT)
                run.checkpoints.wait()
    for text in summary(run.config, recorder.lines, time.perf_counter() - started, run.run_dir):
        run.say(text)


def state_before(run: Run, watchdog: Watchdog) -> State:
    """Compile, and return the state that the next step takes: from a checkpoint, or the first."""
    started = time.perf_counter()
    watchdog.phase("compiling the step")
    with waiting(run.console, "compiling the step"):
        in_background(partial(run.program.compile, evaluation=bool(run.held_out)))
    run.say(f"compiled in {duration(time.perf_counter() - started)}")
    together("compiled", run.config)
    watchdog.phase("making the first state")
    state = first_or_restored(run)
    together("ready for the first step", run.config)
    return state


def together(name: str, config: Config) -> None:
    """Wait for all processes: gloo gives a first collective 30 s, and they do not compile alike.

    Only the first process writes the compilation cache, so a second start finds more than others.
    """
    barrier(name, config.train.first_step_timeout_s)


def first_or_restored(run: Run) -> State:
    """Return the state that the next step takes."""
    if run.position.step == 0:
        return first_state(run.console, run.program)
    with waiting(run.console, "reading the checkpoint"):
        return run.checkpoints.restore(run.program, run.position.step)[0]


def first_state(console: Console, program: Program) -> State:
    """Return the state before the first step: as drawn, or with the weights of another run."""
    state, source = program.init(), program.config.checkpoint.init_from
    if source is None:
        return state
    with waiting(console, f"reading the weights of checkpoint.init_from={source}"):
        main, expert_bias, opt_state = initial_weights(source, program)
    names = frozenset(main)
    main = program.staged(main)
    state = state._replace(weights=program.rebuild(main), main=main, expert_bias=expert_bias)
    if opt_state is None:
        return state
    return state._replace(opt_state=map_parts(opt_state, names, program.staged))


def truncate_metrics(console: Console, path: Path, step: int) -> str:
    """Leave the lines of steps that the state has in it, and say what was taken out."""
    truncated = truncate(path, step)
    if truncated.later and step == 0:
        say(console, f"{path.parent} has no checkpoint, so the run starts anew")
    if truncated.later:
        say(
            console,
            f"{path.name}: {truncated.later} lines of steps that are taken again are dropped",
        )
    if truncated.damaged:
        say(console, f"{path.name}: {truncated.damaged} half-written lines are dropped")
    if truncated.lacking:
        gaps = [f"{a} to {b}" if a < b else f"{a}" for a, b in truncated.lacking]
        say(console, f"{path.name} lacks the lines of steps {listing(gaps, 'and')}")
    return ""


def take_steps(run: Run, state: State, stop: StopSignal, watchdog: Watchdog) -> Recorder:
    """Take the steps that are left, or those until a stop, and begin to save what they led to."""
    config, position = run.config, run.position
    # Only the first process writes lines; all count bad steps.
    path = run.run_dir / run_folder.METRICS if is_first() else Path(os.devnull)
    with (
        MetricsFile(path) as file,
        StepProgress(run.console, config.train.steps) as progress,
        Trace(run.run_dir, config.train.profile) as trace,
        Garbage() as garbage,
    ):
        recorder = Recorder(config, file, progress, list(run.program.layout.parameters), position)
        facts = {**run.facts, horizon.FACT: str(run.begun)}
        saver = CheckpointSaver(run.checkpoints, config, facts, recorder)
        session = Session(recorder, saver, trace, stop, watchdog, garbage)
        settled = horizon.settled(config, run.begun)
        steps = upcoming(settled, run.corpus, run.program.rows, position)
        state = run_steps(run.program, state, steps, run.held_out, session)
        if saver.saved < recorder.done.step:
            watchdog.phase(f"saving step {recorder.done.step}")
            saver.save(run.program.stored(state))
    for text in remarks(recorder, trace):
        run.say(text)
    return recorder


def remarks(recorder: Recorder, trace: Trace) -> Iterator[str]:
    """Yield what is to be known of a checkpoint after bad steps, and of a trace."""
    if recorder.bad:
        good = recorder.done.step - recorder.bad
        yield f"the last {recorder.bad} steps were bad: the weights are those of step {good}"
    if trace.steps:
        yield (
            f"trace of steps {trace.steps[0]} to {trace.steps[-1]}: {trace.folder}"
            if trace.recorded
            else f"no trace: this run took no step {trace.steps[0]} (train.profile.start)"
        )


def summary(config: Config, lines: Sequence[Line], seconds: float, run_dir: Path) -> Iterator[str]:
    """Yield the few lines that a run ends with."""
    first, last = lines[0], lines[-1]
    early = last["step"] < config.train.steps
    ended = (
        f"stopped after step {last['step']} of {config.train.steps}"
        if early
        else f"trained {last['step']} steps"
    )
    now = "" if first["step"] == 1 else f", {len(lines)} steps of them now"
    yield f"\n{ended}{now}: {last['tokens']:,} tokens in {duration(seconds)}"
    held_out = f", eval {last['eval_loss']:.4f}" if "eval_loss" in last else ""
    yield f"  loss    {first['loss']:.4f} -> {last['loss']:.4f}{held_out}"
    yield f"  speed   {speed(config, lines)}"
    if skipped := sum(line["skipped"] for line in lines):
        yield f"  skipped {skipped} steps"
    yield f"  written {run_dir}: {', '.join(run_folder.contents(run_dir))}"
    if early:
        yield "  the same command resumes from here"


def speed(config: Config, lines: Sequence[Line]) -> str:
    """Return tokens and model FLOPs per second, without the first step."""
    timed = lines[1:] or lines
    tokens = sum(line["tokens_per_s"] * line["step_time_s"] for line in timed)
    rate = tokens / sum(line["step_time_s"] for line in timed)
    flops = rate * flops_per_token(config.model, config.train.sequence_length)
    unit, name = (1e12, "TFLOP/s") if flops >= 1e11 else (1e9, "GFLOP/s")
    return f"{rate:,.0f} tokens/s, {flops / unit:,.1f} model {name}"
