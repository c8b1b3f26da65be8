"""What a user sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from olmo_jax.formatting import duration
from olmo_jax.runtime.streams import Unfailing
from olmo_jax.train.metrics import Line

NUM_PLAIN_LINES = 20


def open_console() -> Console:
    """Return the console of a command: a run outlives whoever reads its output."""
    return Console(file=cast(IO[str], Unfailing(sys.stdout)))


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colour, no folding at 80 columns."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show that something long goes on: a spinner on a terminal, else one line."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    say(console, what)
    yield


def in_background(work: Callable[[], Any]) -> None:
    """Run `work` to its end in a thread, so that Ctrl-C is heard while XLA compiles."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 it is raised below, in the thread that waits
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failure:
        raise failure[0]


class StepProgress:
    """Shows each step's line; open it around the loop."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._every = math.ceil(total_steps / NUM_PLAIN_LINES)
        self._seconds: list[float] = []
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "StepProgress":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, line: Line) -> None:
        """Show one step's line, and a note if the step was skipped or had an evaluation."""
        step = line["step"]
        self._seconds.append(line["step_time_s"])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._text(line))
        elif len(self._seconds) == 1 or step % self._every == 0 or step == self._total:
            say(self._console, f"step {step}/{self._total}  {self._text(line)}")
        for note in notes(line):
            say(self._console, f"step {step}: {note}")

    def _text(self, line: Line) -> str:
        recent = self._seconds[-20:]
        left = (self._total - line["step"]) * sum(recent) / len(recent)
        loss = f"loss {line['loss']:.3f}"
        return f"{loss}  {line['tokens_per_s']:,.0f} tokens/s  {duration(left)} left"


def notes(line: Line) -> Iterator[str]:
    """Yield what deserves a line of its own."""
    if line["skipped"]:
        yield (
            f"skipped, weights kept (loss {line['loss']:.4g}, "
            f"gradient norm {line['grad_norm']:.4g})"
        )
    if "eval_loss" in line:
        yield f"eval loss {line['eval_loss']:.4f}, perplexity {line['eval_perplexity']:.2f}"


class StageProgress:
    """Shows how far each stage of a job has come: a bar on a terminal, else a line a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            self._bar = Progress(console=self._console)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` is behind us in `stage`."""
        if stage != self._stage:
            self._stage = stage
            if self._bar is None:
                say(self._console, stage)
            else:
                self._task = self._bar.add_task(stage, total=total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
