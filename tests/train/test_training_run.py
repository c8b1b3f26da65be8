"""The loop with a program that computes nothing: order, cadence, files, stopping."""

import errno
import io
import json
import math
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from rich.console import Console

from olmo_jax.checkpoint import Checkpoints, Position
from olmo_jax.config import Config
from olmo_jax.data.batch import Batch
from olmo_jax.data.corpus import Corpus
from olmo_jax.errors import UserError
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.runtime.garbage import Garbage
from olmo_jax.runtime.stop_signal import StopSignal
from olmo_jax.runtime.watchdog import Watchdog
from olmo_jax.train import run_folder, run_id, training_run
from olmo_jax.train.loop import (
    CheckpointSaver,
    Recorder,
    Session,
    Upcoming,
    evaluate,
    run_steps,
    upcoming,
)
from olmo_jax.train.metrics import MetricsFile, read, truncate
from olmo_jax.train.program import Program
from olmo_jax.train.progress import StepProgress, in_background
from olmo_jax.train.state import State
from olmo_jax.train.trace import Trace
from olmo_jax.train.training_run import speed, summary

VALUES = {
    "loss": 0.1,
    "z_loss": 2.0,
    "balance_loss": 1.5,
    "router_z_loss": 0.25,
    "grad_norm": 3.0,
    "skipped": 0,
    "drop_rate": 0.125,
    "max_load": 1.75,
    "tokens": 64,
    "stop": 0,
    "bad_leaves": np.zeros(3, np.int32),
}
LEAVES = ["embedding", "body", "head"]
KEYS = [
    *("step", "tokens", "loss", "z_loss", "balance_loss", "router_z_loss", "grad_norm", "lr"),
    *("skipped", "drop_rate", "max_load", "tokens_per_s", "step_time_s"),
]
STATE = State({}, {}, {}, {}, {}, np.int32(0))  # type: ignore[arg-type]
NO_BATCH = Batch(*[np.zeros((1, 1), np.int32)] * 6)


@dataclass
class Deferred:
    """A value that logs when it is read, as the loop would wait for a device then."""

    value: float
    log: list[tuple[Any, ...]]
    name: str
    delay_s: float = 0.0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.log.append(("read", self.name))
        time.sleep(self.delay_s)
        return np.asarray(self.value, np.float32)


@dataclass(frozen=True)
class IdleProgram(Program):
    """Answers at once; `special` has the values of single steps that differ."""

    special: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    evaluation_s: float = 0.0

    def place(self, batch: Any) -> Any:
        return batch

    def step(self, state: Any, batch: Any, lr: float, stop: bool = False) -> Any:
        number = sum(entry[0] == "step" for entry in self.log) + 1
        self.log.append(("step", number, stop))
        values = {**VALUES, **self.special.get(number, {})}
        # Read after the other values, whatever their order is.
        values["loss"] = Deferred(values["loss"], self.log, f"step {number}")
        return state, values

    def stored(self, state: Any) -> Any:
        return state

    def evaluate(self, state: Any, batch: Any) -> Any:
        self.log.append(("evaluate",))
        return {
            "ce_sum": Deferred(20.0, self.log, "evaluation", self.evaluation_s),
            "loss_tokens": np.int32(10),
        }


@dataclass
class Ran:
    log: list[tuple[Any, ...]]
    lines: list[dict[str, Any]]
    shown: str
    stop: StopSignal


def config_of(steps: int, **train: Any) -> Config:
    return Config.model_validate(
        {
            "train": {"steps": steps, "sequence_length": 8, **train},
            "optim": {"lr": 1.0, "schedule": {"kind": "constant", "warmup": 4}},
        }
    )


@dataclass
class WeightShard:
    """Stands for the checkpoints: remembers after which step what was saved."""

    log: list[tuple[Any, ...]]

    def save(self, state: Any, position: Position, **_: Any) -> None:
        self.log.append(("save", position.step))

    def steps(self) -> list[int]:
        return [entry[1] for entry in self.log if entry[0] == "save"]


def at(step: int) -> Position:
    return Position(step, 8 * step, 64 * step)


def run(
    tmp_path: Path,
    config: Config,
    *,
    special: dict[int, dict[str, Any]] | None = None,
    held_out: int = 0,
    signals: dict[int, int] | None = None,
    evaluation_s: float = 0.0,
    log: list[tuple[Any, ...]] | None = None,
) -> Ran:
    """Run the loop; `signals` are sent to this process before the steps of these numbers."""
    sizes = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "sequence": 1}
    program = IdleProgram(
        config,
        build_mesh(sizes),
        special or {},
        [] if log is None else log,
        evaluation_s=evaluation_s,
    )
    shown = io.StringIO()

    def steps():
        for step in range(1, config.train.steps + 1):
            if number := (signals or {}).get(step):
                os.kill(os.getpid(), number)
            yield Upcoming(at(step), NO_BATCH, 0.5)

    path = tmp_path / "metrics.jsonl"
    with (
        MetricsFile(path) as file,
        StepProgress(Console(file=shown), config.train.steps) as progress,
        Trace(tmp_path, config.train.profile) as trace,
        StopSignal() as stop,
    ):
        session = session_of(config, file, progress, trace, stop, program.log)
        run_steps(program, STATE, steps(), [NO_BATCH] * held_out, session)
    return Ran(program.log, read(path), shown.getvalue(), stop)


def session_of(
    config: Config,
    file: MetricsFile,
    progress: StepProgress,
    trace: Trace,
    stop: StopSignal,
    log: list[tuple[Any, ...]],
) -> Session:
    recorder = Recorder(config, file, progress, LEAVES, at(0))
    # The types are checked at the calls, so what stands for the checkpoints is put in afterwards.
    saver = CheckpointSaver(MagicMock(spec=Checkpoints), config, {}, recorder)
    saver.checkpoints = WeightShard(log)  # type: ignore[assignment]
    watchdog = Watchdog("nowhere", 0, 1, 600.0, 600.0)
    return Session(recorder, saver, trace, stop, watchdog, Garbage())


def test_a_line_has_the_documented_keys_in_full_precision(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(2))
    assert list(ran.lines[0]) == KEYS
    assert [line["step"] for line in ran.lines] == [1, 2]
    assert [line["tokens"] for line in ran.lines] == [64, 128]
    assert ran.lines[0]["loss"] == float(np.float32(0.1)) != 0.1
    line = ran.lines[1]
    assert line["tokens_per_s"] == pytest.approx(64 / line["step_time_s"])
    assert line["lr"] == 0.5


def test_a_step_is_read_after_the_next_one_is_dispatched(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(3))
    order = [entry[:2] for entry in ran.log]
    assert order == [
        ("step", 1),
        ("step", 2),
        ("read", "step 1"),
        ("step", 3),
        ("read", "step 2"),
        ("read", "step 3"),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_signal_ends_the_run_after_the_step_it_meets(tmp_path: Path, number: int) -> None:
    ran = run(tmp_path, config_of(9, eval_every=4), signals={4: number}, held_out=1)
    assert [line["step"] for line in ran.lines] == [1, 2, 3, 4]
    assert ran.log[-3:] == [("step", 4, True), ("read", "step 3"), ("read", "step 4")]


def test_a_stop_that_another_process_was_asked_for_ends_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(9), special={3: {"stop": 1}})
    assert not ran.stop.requested
    # Step 4 was dispatched before step 3 could be read, here as in every other process.
    assert [line["step"] for line in ran.lines] == [1, 2, 3, 4]


def test_several_processes_wait_until_the_stop_has_reached_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = config_of(9, eval_every=2)
    ran = run(tmp_path, config, signals={2: signal.SIGTERM}, special={3: {"stop": 1}}, held_out=1)
    # The others evaluate after step 2, so this one must.
    assert ran.log.count(("evaluate",)) == 2
    assert [entry for entry in ran.log if entry[0] == "step"] == [
        ("step", 1, False),
        ("step", 2, True),
        ("step", 3, True),
        ("step", 4, True),
    ]


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_second_ctrl_c_interrupts() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 5]), (0, [5])])
def test_evaluation_comes_every_so_often_and_at_the_end(
    tmp_path: Path, every: int, expected: list[int]
) -> None:
    ran = run(tmp_path, config_of(5, eval_every=every), held_out=2)
    evaluated = [line for line in ran.lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == expected
    assert evaluated[0]["eval_loss"] == 2.0
    assert evaluated[0]["eval_perplexity"] == pytest.approx(math.exp(2))
    # Both batches, once the step is done and before the next one takes its state away; each is
    # read before the next is dispatched, since XLA:CPU deadlocks on a long queue.
    read = ran.log.index(("read", f"step {expected[0]}"))
    assert ran.log[read + 1 : read + 5] == [("evaluate",), ("read", "evaluation")] * 2
    assert ("step", expected[0] + 1, False) not in ran.log[:read]


def test_a_signal_while_the_weights_are_written_does_not_cost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2).model_copy(update={"run_dir": str(tmp_path / "run")})
    sizes = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "sequence": 1}
    program = IdleProgram(config, build_mesh(sizes))
    saved = []

    def wait(_: Any, *, prune: bool = True) -> None:
        del prune
        if not saved:
            os.kill(os.getpid(), signal.SIGTERM)
        saved.append(True)

    monkeypatch.setattr(IdleProgram, "init", lambda self: STATE)
    monkeypatch.setattr(IdleProgram, "compile", lambda self, evaluation: None)
    monkeypatch.setattr(
        training_run, "corpus_of", lambda _: MagicMock(spec=Corpus, tokenizer_path=None)
    )
    monkeypatch.setattr(training_run, "build_here", lambda _: program)
    monkeypatch.setattr(training_run.resume_checks, "facts_of", lambda _: {})
    monkeypatch.setattr(
        training_run, "upcoming", lambda *_: (Upcoming(at(n), NO_BATCH, 0.5) for n in (1, 2))
    )
    monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: None)
    monkeypatch.setattr(Checkpoints, "wait", wait)
    training_run.train(config)
    assert saved
    assert (tmp_path / "run" / "report.png").is_file()


def test_a_stop_during_a_long_evaluation_ends_it(tmp_path: Path) -> None:
    config = config_of(1)
    sizes = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "sequence": 1}
    program = IdleProgram(config, build_mesh(sizes))
    stop = StopSignal()
    stop.requested = True
    progress = StepProgress(Console(), 1)
    file, trace = MetricsFile(tmp_path / "metrics.jsonl"), Trace(tmp_path, None)
    session = session_of(config, file, progress, trace, stop, program.log)
    assert evaluate(program, STATE, [NO_BATCH] * 9, session) == []
    assert program.log.count(("evaluate",)) == 1


def test_without_held_out_documents_nothing_is_evaluated(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(3))
    assert not any("eval_loss" in line for line in ran.lines)


def test_no_step_is_charged_for_an_evaluation(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(4, eval_every=2), held_out=1, evaluation_s=1.0)
    assert all(line["step_time_s"] < 0.9 for line in ran.lines)


def test_a_bad_step_is_shown_and_written_as_nan(tmp_path: Path) -> None:
    ran = run(tmp_path, config_of(3), special={2: {"loss": math.nan, "skipped": 1}})
    assert math.isnan(ran.lines[1]["loss"])
    assert [line["skipped"] for line in ran.lines] == [0, 1, 0]
    assert "step 2: skipped, weights kept (loss nan" in ran.shown
    assert "step 2/3  loss nan" in ran.shown


def test_plain_lines_are_few_and_show_first_and_last(tmp_path: Path) -> None:
    shown = run(tmp_path, config_of(100)).shown.splitlines()
    assert len(shown) == 21
    assert shown[0].startswith("step 1/100  loss 0.100  ")
    assert shown[-1].startswith("step 100/100  ")
    assert all("tokens/s" in line and line.endswith(" left") for line in shown)


def test_the_first_step_after_going_on_is_shown() -> None:
    shown = io.StringIO()
    with StepProgress(Console(file=shown), 100) as progress:
        for step in (52, 53):
            progress.show(
                {"step": step, "loss": 1.0, "tokens_per_s": 9, "step_time_s": 1.0, "skipped": 0}
            )
    assert [line[:11] for line in shown.getvalue().splitlines()] == ["step 52/100"]


def test_routing_that_is_not_learned_is_labelled(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"router": {"assignment": "random"}}})
    lines = run(tmp_path, config.model_copy(update={"train": config_of(1).train})).lines
    assert lines[0]["assignment"] == "random"


def test_expert_counts_are_written_when_the_step_has_them(tmp_path: Path) -> None:
    counts = np.array([[1, 2], [3, 4]])
    lines = run(tmp_path, config_of(1), special={1: {"expert_counts": counts}}).lines
    assert lines[0]["expert_counts"] == [[1, 2], [3, 4]]


@dataclass(frozen=True)
class Rows:
    """Stands for a corpus; remembers from where and for whom it was read."""

    asked: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def batches(self, consumed: int, global_batch: int, rows: Any) -> Any:
        self.asked.append((consumed, global_batch, tuple(rows)))
        while True:
            yield NO_BATCH


def steps_after(config: Config, done: Position, corpus: Any) -> list[Upcoming]:
    # The type of the corpus is checked at the call, so the function beneath the check is taken.
    return list(getattr(upcoming, "__wrapped__", upcoming)(config, corpus, [1], done))


def test_steps_tokens_and_rate_go_on_where_the_run_was() -> None:
    config, corpus = config_of(6, global_batch=2), Rows()
    whole = steps_after(config, at(0), corpus)
    assert [step.position for step in whole] == [Position(n, 2 * n, 16 * n) for n in range(1, 7)]
    assert [step.lr for step in whole] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert steps_after(config, whole[2].position, corpus) == whole[3:]
    assert corpus.asked == [(0, 2, (1,)), (6, 2, (1,))]


def test_another_global_batch_goes_on_after_the_sequences_that_were_consumed() -> None:
    corpus = Rows()
    steps = steps_after(config_of(6, global_batch=5), Position(4, 8, 64), corpus)
    assert corpus.asked == [(8, 5, (1,))]
    assert [step.position for step in steps] == [Position(5, 13, 104), Position(6, 18, 144)]


def test_a_schedule_in_tokens_ends_with_the_run_after_a_change_of_the_batch() -> None:
    schedule = {"kind": "linear", "unit": "tokens", "final": 0.0}
    config = Config.model_validate(
        {"train": {"steps": 6, "sequence_length": 8}, "optim": {"lr": 1.0, "schedule": schedule}}
    )
    whole = steps_after(config, at(0), Rows())
    assert whole[-1].lr == 0
    assert steps_after(config, whole[1].position, Rows()) == whole[2:]
    half = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 4})})
    rates = [step.lr for step in steps_after(half, whole[1].position, Rows())]
    assert rates == [0.375, 0.25, 0.125, 0]


def test_a_folder_with_something_of_a_run_and_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"holds metrics.jsonl and no config.yaml.*another run_dir"):
        run_folder.refuse_foreign(tmp_path)
    (tmp_path / "config.yaml").touch()
    run_folder.refuse_foreign(tmp_path)
    run_folder.refuse_foreign(tmp_path / "new")


def test_checkpoints_come_every_so_often_and_never_ahead_of_the_metrics(tmp_path: Path) -> None:
    ran = run(tmp_path, saving(7, every=3))
    saves = [i for i, entry in enumerate(ran.log) if entry[0] == "save"]
    assert [ran.log[i] for i in saves] == [("save", 3), ("save", 6)]
    # The step is read, and so its line is written, and the next one has not taken the state away.
    assert [ran.log[i - 1] for i in saves] == [("read", "step 3"), ("read", "step 6")]
    assert [ran.log[i + 1][:2] for i in saves] == [("step", 4), ("step", 7)]


def saving(steps: int, *, every: int, **train: Any) -> Config:
    config = config_of(steps, **train)
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every": every})}
    )


BAD = {"loss": math.nan, "skipped": 1, "bad_leaves": np.array([0, 1, 1])}


def test_a_checkpoint_that_is_due_in_bad_steps_waits_for_a_good_one(tmp_path: Path) -> None:
    ran = run(tmp_path, saving(9, every=3), special={3: BAD, 4: BAD})
    assert [entry for entry in ran.log if entry[0] == "save"] == [
        ("save", 5),
        ("save", 6),
        ("save", 9),
    ]


def test_bad_steps_in_a_row_end_the_run_and_name_the_leaves(tmp_path: Path) -> None:
    special = dict.fromkeys((2, 3, 5, 6, 7, 8), BAD)
    with pytest.raises(UserError) as refused:
        run(tmp_path, saving(20, every=1, max_bad_steps=3), special=special)
    text = str(refused.value)
    assert "train.max_bad_steps=3: loss or gradient norm was not finite in 3 steps in a row" in text
    assert "up to step 7 (loss nan" in text
    assert "not finite: body and head)" in text
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    named = [line["step"] for line in lines if line.get("bad_leaves") == ["body", "head"]]
    assert named == [2, 3, 5, 6, 7]


@pytest.mark.parametrize(
    ("every", "good", "words"),
    [
        (0, 2, "no checkpoint, so the same command starts anew: look at the data"),
        (2, 3, "resumes from runs/x/checkpoints/step_2, and there were good steps since: look at"),
        (2, 2, r"step_2, and no step since was good, .* remove that folder, and it starts anew"),
        (1, 2, r"step_2, and no .* folder, and it resumes from runs/x/checkpoints/step_1"),
    ],
)
def test_too_many_bad_steps_name_the_checkpoint_that_stays(
    tmp_path: Path, every: int, good: int, words: str
) -> None:
    config = saving(9, every=every, max_bad_steps=2).model_copy(update={"run_dir": "runs/x"})
    with pytest.raises(UserError, match=words):
        run(tmp_path, config, special=dict.fromkeys(range(good + 1, 9), BAD))


def test_a_trace_has_the_steps_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _: log.append(("start", "trace")))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append(("stop", "trace")))
    run(tmp_path, config_of(5, profile={"start": 2, "steps": 2}), log=log)
    # What came before has ended when it starts, and its own last step when it stops.
    assert [entry[:2] for entry in log] == [
        *[("step", 1), ("read", "step 1"), ("start", "trace"), ("step", 2), ("step", 3)],
        *[("read", "step 2"), ("read", "step 3"), ("stop", "trace"), ("step", 4), ("step", 5)],
        *[("read", "step 4"), ("read", "step 5")],
    ]
    log.clear()
    run(tmp_path, config_of(3, profile={"start": 3, "steps": 9}), log=log)
    assert [entry[0] for entry in log if entry[0] != "read"] == [
        *("step", "step", "start", "step", "stop"),
    ]


def test_a_run_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Config(run_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(UserError, match="cannot be written"):
        run_folder.create(config, "table", None)


def test_a_folder_has_one_run_at_a_time_and_a_lock_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    first, second = run_folder.Lock(run_dir), run_folder.Lock(run_dir)
    first.take()
    busy = rf"run_dir=.*x is in use by process {os.getpid()} on .* \(since 20.*another run_dir"
    with pytest.raises(UserError, match=busy):
        second.take()
    second.free()
    with pytest.raises(UserError, match=busy):
        second.take()
    first.free()
    assert not run_dir.exists()
    # A killed process leaves the file, and nobody holds it.
    run_dir.mkdir()
    (run_dir / ".lock").write_text("1 on elsewhere")
    second.take()
    second.free()
    assert list(run_dir.iterdir()) == []


def test_a_lock_on_a_file_that_its_last_holder_removed_holds_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (run_folder.Lock(tmp_path) for _ in range(3))
    first.take()
    flock = run_folder.fcntl.flock

    def late(file: int, flags: int) -> None:
        # The second has opened the file when the first removes it.
        first.free()
        flock(file, flags)

    monkeypatch.setattr(run_folder.fcntl, "flock", late)
    second.take()
    with pytest.raises(UserError, match="is in use"):
        third.take()
    second.free()


def test_a_run_learns_that_its_folder_is_another_one_and_leaves_that_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first, second = run_folder.Lock(run_dir), run_folder.Lock(run_dir)
    first.refuse_lost()
    first.take()
    first.refuse_lost()
    shutil.rmtree(run_dir)
    for there in (False, True):
        if there:
            second.take()
        with pytest.raises(UserError, match=r"run or its \.lock was removed.* nothing more is wri"):
            first.refuse_lost()
    first.free()
    # The second one's lock is its own.
    second.refuse_lost()
    assert (run_dir / ".lock").is_file()
    second.free()
    assert not run_dir.exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(
    tmp_path: Path, link: Any
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("dear")
    (tmp_path / "run").mkdir()
    link(mine, tmp_path / "run" / ".lock")
    with pytest.raises(UserError, match=r"\.lock is a link; .* remove it"):
        run_folder.Lock(tmp_path / "run").take()
    assert mine.read_text() == "dear"


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path: Path) -> None:
    mine, file = tmp_path / "mine.txt", tmp_path / "config.yaml"
    mine.write_text("dear")
    for name in ("config.yaml", ".config.yaml.new"):
        (tmp_path / name).symlink_to(mine)
    run_folder.replace(file, b"new")
    assert (mine.read_text(), file.read_text(), file.is_symlink()) == ("dear", "new", False)


@pytest.mark.parametrize("name", ["exp[x]", "a*", "a?", "a\\b"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(UserError, match=r"run_dir=.* in a path for a pattern of several; write"):
        training_run.train(Config(run_dir=str(tmp_path / name / "run")))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError, match=r"run_dir=run is /.* and has "):
        training_run.train(Config(run_dir="run"))
    assert list((tmp_path / name).iterdir()) == []


def test_a_new_run_folder_gets_an_id_and_keeps_it(tmp_path: Path) -> None:
    made = run_id.identify(tmp_path)
    assert len(made) == 16
    assert run_id.identify(tmp_path) == made == (tmp_path / "run_id").read_text().strip()
    (tmp_path / "other").mkdir()
    assert run_id.identify(tmp_path / "other") != made


@pytest.mark.parametrize(("facts", "wanted"), [({}, ""), ({"run_id": "ab"}, "ab")])
def test_a_run_folder_without_an_id_is_known_by_its_checkpoints(
    tmp_path: Path, facts: dict[str, str], wanted: str
) -> None:
    folder = tmp_path / "checkpoints" / "step_3"
    (folder / "manifest").mkdir(parents=True)
    (folder / "commit_success.txt").touch()
    (folder / "manifest" / "manifest.json").write_text(json.dumps({"facts": facts}))
    assert run_id.identify(tmp_path) == wanted
    # A run of an old version stays as it is.
    assert (tmp_path / "run_id").exists() == bool(wanted)


def test_where_the_file_system_has_no_locks_a_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(code: int) -> Any:
        def flock(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        return flock

    monkeypatch.setattr(run_folder.fcntl, "flock", refused(errno.EOPNOTSUPP))
    run_folder.Lock(tmp_path).take()
    monkeypatch.setattr(run_folder.fcntl, "flock", refused(errno.EIO))
    with pytest.raises(UserError, match="cannot be written"):
        run_folder.Lock(tmp_path).take()


def test_a_full_disk_is_said_once_and_names_the_metrics() -> None:
    full = r"/dev/full cannot be written \(No space left on device\); each step's line"
    with pytest.raises(UserError, match=full), MetricsFile(Path("/dev/full")) as file:
        file.write({"step": 1})


def test_a_disk_that_fails_while_lines_are_put_on_it_is_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    path = tmp_path / "metrics.jsonl"
    refused = pytest.raises(UserError, match=r"metrics.jsonl cannot be written .No space")
    with refused, MetricsFile(path) as file:
        file.write({"step": 1})
        file.keep()
    with refused:
        truncate(path, 0)
    # What was begun in its place is gone, and it is as it was.
    assert list(tmp_path.iterdir()) == [path]
    assert read(path) == [{"step": 1}]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_half_written_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 is no JSON"):
        read(path)


def test_the_summary_says_what_came_out_and_what_was_written(tmp_path: Path) -> None:
    lines = run(tmp_path, config_of(4), held_out=1, special={4: {"loss": 0.05}}).lines
    text = "\n".join(summary(config_of(4), lines, 75.0, tmp_path))
    assert "trained 4 steps: 256 tokens in 1 min 15 s" in text
    assert "0.1000 -> 0.0500, eval 2.0000" in text
    assert "metrics.jsonl" in text
    early = "\n".join(summary(config_of(9), lines, 75.0, tmp_path))
    assert "stopped after step 4 of 9" in early


def test_speed_leaves_the_first_step_out() -> None:
    lines = [{"tokens_per_s": 1.0, "step_time_s": 100.0}, {"tokens_per_s": 500.0, "step_time_s": 2}]
    assert speed(config_of(2), lines).startswith("500 tokens/s, ")


def test_what_fails_in_the_background_fails_in_front() -> None:
    def fail() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        in_background(fail)


def test_a_written_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1})
        assert json.loads(path.read_text()) == {"step": 1}
