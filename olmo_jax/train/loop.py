"""The steps of a run, one dispatched while the one before is read, and what happens between two."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from olmo_jax.checkpoint import Checkpoints, Position
from olmo_jax.config import Config
from olmo_jax.config.messages import listing
from olmo_jax.data.batch import Batch
from olmo_jax.data.corpus import Corpus
from olmo_jax.errors import UserError
from olmo_jax.optim.schedule import learning_rate
from olmo_jax.runtime.garbage import Garbage
from olmo_jax.runtime.stop_signal import StopSignal
from olmo_jax.runtime.watchdog import Watchdog
from olmo_jax.train.horizon import totals
from olmo_jax.train.metrics import Line, MetricsFile, evaluation_of, line_of
from olmo_jax.train.program import Program
from olmo_jax.train.progress import StepProgress
from olmo_jax.train.state import State
from olmo_jax.train.trace import Trace


class Upcoming(NamedTuple):
    """A step before its dispatch; `position` is where the run stands after it."""

    position: Position
    batch: Batch
    lr: float


class Pending(NamedTuple):
    """A dispatched step; its values may not be there yet."""

    position: Position
    lr: float
    values: Mapping[str, Any]


def upcoming(
    config: Config, corpus: Corpus, rows: Sequence[int], done: Position
) -> Iterator[Upcoming]:
    """Yield every step after `done`, with these rows of its batch and its learning rate."""
    train = config.train
    # No position is padding: every row of the training data is full.
    step_tokens = train.global_batch * train.sequence_length
    rate = partial(learning_rate, config.optim, **totals(train, done))
    batches = corpus.batches(done.sequences, train.global_batch, rows)
    for number, batch in zip(range(1, train.steps - done.step + 1), batches, strict=False):
        position = Position(
            step=done.step + number,
            sequences=done.sequences + number * train.global_batch,
            tokens=done.tokens + number * step_tokens,
        )
        yield Upcoming(position, batch, rate(step=position.step, tokens=position.tokens))


@dataclass
class Recorder:
    """Turns pending steps into lines of the metrics file and of the display, and counts bad ones.

    `leaves` names the entries of a step's `bad_leaves`, `done` is where the last step read leaves
    the run, `bad` the number of bad steps since the last good one.
    """

    config: Config
    file: MetricsFile
    progress: StepProgress
    leaves: Sequence[str]
    done: Position
    lines: list[Line] = field(default_factory=list)
    bad: int = 0
    _last: float = field(default_factory=time.perf_counter)

    def finish(
        self, pending: Pending, evaluate: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    ) -> bool:
        """Wait for a step and its evaluation, write its line, and say whether a stop was asked."""
        values = jax.device_get(pending.values)
        step_time_s = time.perf_counter() - self._last
        parts = jax.device_get(list(evaluate())) if evaluate else []
        good = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        line = line_of(
            values,
            step=pending.position.step,
            tokens=pending.position.tokens,
            lr=pending.lr,
            step_time_s=step_time_s,
            assignment=self.config.model.router.assignment,
            evaluation=evaluation_of(parts) if parts else None,
            bad_leaves=None if good else self._named(values["bad_leaves"]),
        )
        self.file.write(line)
        self.progress.show(line)
        self.lines.append(line)
        self.done, self.bad = pending.position, 0 if good else self.bad + 1
        # After the evaluation: its time is no step's.
        self.restart_clock()
        return bool(values["stop"])

    def restart_clock(self) -> None:
        """Begin the next step's time now."""
        self._last = time.perf_counter()

    def _named(self, flags: np.ndarray) -> list[str]:
        return [name for name, flag in zip(self.leaves, flags, strict=True) if flag]


def _too_many(line: Line, bad: int, way_out: str) -> str:
    leaves = listing(line["bad_leaves"], "and") if line["bad_leaves"] else "none"
    return (
        f"train.max_bad_steps={bad}: loss or gradient norm was not finite in {bad} steps in a row, "
        f"up to step {line['step']} (loss {line['loss']:.4g}, gradient norm "
        f"{line['grad_norm']:.4g}, gradients that are not finite: {leaves}); none was applied, and "
        f"so many end a run; {way_out}"
    )


@dataclass
class CheckpointSaver:
    """Writes a checkpoint when one is due, with what it takes to resume from it.

    `saved` is the step of the last one. One that is due after a bad step waits for a good one: if
    the state is broken, the checkpoints before it must not make room for it.
    """

    checkpoints: Checkpoints
    config: Config
    facts: Mapping[str, str]
    recorder: Recorder
    saved: int = 0
    _due: bool = False

    def due(self, step: int) -> bool:
        """Say whether a checkpoint follows `step`, or one of the steps before it lacks its own."""
        every = self.config.checkpoint.every
        self._due |= every > 0 and step % every == 0
        return self._due

    def save(self, state: State) -> None:
        """Copy a `Program.stored` state, whose steps have all been read; the run goes on."""
        self.recorder.file.keep()
        done = self.recorder.done
        self.checkpoints.save(state, done, config=self.config, facts=self.facts)
        self.saved, self._due = done.step, False

    def way_out(self) -> str:
        """Return what the same command does after too many bad steps, and what to change."""
        known = sorted({*self.checkpoints.steps(), self.saved} - {0})
        if not known:
            return (
                "there is no checkpoint, so the same command starts anew: look at the data, write "
                "a smaller optim.lr or a larger train.max_bad_steps"
            )
        *before, last = known
        begin = f"the same command resumes from {self._folder(last)}"
        if last < self.recorder.done.step - self.recorder.bad:
            return (
                f"{begin}, and there were good steps since: look at the data in between, write a "
                "smaller optim.lr or a larger train.max_bad_steps"
            )
        other = f"resumes from {self._folder(before[-1])}" if before else "starts anew"
        return (
            f"{begin}, and no step since was good, so its weights may be what is broken: look at "
            "the data that follows, write a smaller optim.lr; if that does not help, remove that "
            f"folder, and it {other}"
        )

    def _folder(self, step: int) -> str:
        return f"{self.config.run_dir}/checkpoints/step_{step}"


@dataclass(frozen=True)
class Session:
    """What takes part between two steps."""

    recorder: Recorder
    saver: CheckpointSaver
    trace: Trace
    stop: StopSignal
    watchdog: Watchdog
    garbage: Garbage

    def finish(
        self,
        pending: Pending | None,
        evaluate: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ) -> bool:
        """Finish a step, if there is one to finish; say whether a stop was asked.

        Raises: UserError after `train.max_bad_steps` bad steps in a row.
        """
        if pending is None:
            return False
        recorder = self.recorder
        told = recorder.finish(pending, evaluate)
        if recorder.bad >= recorder.config.train.max_bad_steps:
            raise UserError(_too_many(recorder.lines[-1], recorder.bad, self.saver.way_out()))
        self.watchdog.beat(pending.position.step)
        return told


def run_steps(
    program: Program,
    state: State,
    steps: Iterator[Upcoming],
    held_out: Sequence[Batch],
    session: Session,
) -> State:
    """Dispatch each step, then read the one before it, so that devices never wait for the host.

    A stop that this process was asked for goes into the next step and comes back from it as a
    maximum over all devices: every process then leaves after the same step. Evaluation, checkpoint
    and the ends of a trace wait for their step: none is charged for the other, and a checkpoint
    never is ahead of the metrics.
    """
    #     host       dispatch 1  dispatch 2  read 1  dispatch 3  read 2  ...
    #     devices    [ step 1           ][ step 2            ][ step 3
    #
    # A step is read when the next one is queued already, so the devices have work while the host
    # waits for numbers, writes them and puts the next batch.
    recorder, saver, trace, stop = session.recorder, session.saver, session.trace, session.stop
    pending, told = None, False
    for position, batch, lr in steps:
        step = position.step
        if trace.begins_with(step):
            told |= session.finish(pending)
            pending = None
            trace.start()
            recorder.restart_clock()
        # The state is donated: after this only the new one exists.
        state, values = program.step(state, program.put(batch), lr, stop.requested)
        told |= session.finish(pending)
        pending = Pending(position, lr, values)
        # With one process there is nobody to agree with.
        alone_and_asked = stop.requested and jax.process_count() == 1
        evaluating = held_out and evaluation_due(program.config, step) and not alone_and_asked
        saving, traced = saver.due(step), trace.ends_with(step)
        # Here the order is not overlapped: what follows needs the state of this step, and its lines
        # in the metrics file.
        if evaluating or saving or traced:
            evaluation = partial(evaluate, program, state, held_out, session)
            told |= session.finish(pending, evaluation if evaluating else None)
            pending = None
        if traced:
            trace.stop()
            recorder.restart_clock()
        if saving and recorder.bad == 0:
            session.watchdog.phase(f"saving step {step}")
            saver.save(program.stored(state))
            recorder.restart_clock()
        session.garbage.after(step)
        if told or alone_and_asked:
            break
    session.finish(pending)
    return state


def evaluate(
    program: Program, state: State, held_out: Sequence[Batch], session: Session
) -> list[Mapping[str, Any]]:
    """Return each held-out batch's values; none if a lone process is asked to stop meanwhile.

    One batch at a time: XLA:CPU deadlocks when dozens of programs with collectives are queued.
    """
    parts = []
    for batch in held_out:
        session.watchdog.phase("evaluating")
        parts.append(jax.device_get(program.evaluate(state, batch)))
        if session.stop.requested and jax.process_count() == 1:
            return []
    return parts


def evaluation_due(config: Config, step: int) -> bool:
    """Say whether an evaluation follows `step`: every `train.eval_every` steps and at the end."""
    every = config.train.eval_every
    return step == config.train.steps or (every > 0 and step % every == 0)
