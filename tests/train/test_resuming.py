"""Whole runs that end in the middle, and resume as if they had not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_jax.checkpoint import read_saved, restore_weights
from olmo_jax.checkpoint.inspection import diff
from olmo_jax.config import Config
from olmo_jax.config.records import CheckpointConfig, DataConfig, SourceConfig
from olmo_jax.config_file import to_yaml
from olmo_jax.errors import UserError
from olmo_jax.train import training_run
from olmo_jax.train.metrics import read
from olmo_jax.train.program import Program, build_here
from olmo_jax.train.run_folder import Lock
from tests import cases
from tests.data.folders import write_folder

STEPS, HALF, GLOBAL_BATCH = 8, 4, 4
CHECKPOINTS = CheckpointConfig(every=HALF, keep=9)

Train = Callable[..., "list[np.ndarray]"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs in eight steps, so that a run resumes in the middle of a shuffle."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, cases.VOCAB, length).tolist() for length in [11, 30, 7] * 8]
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return write_folder(folder, documents, vocab_size=cases.VOCAB)


@pytest.fixture(scope="module")
def config(tokens: Path) -> Config:
    base = cases.tiny(
        {"expert": 2},
        global_batch=GLOBAL_BATCH,
        optim={"skip_sigma": 6.0, "skip_window": 4, "lr": 1e-2},
        train={"steps": STEPS},
    )
    data = DataConfig(sources=(SourceConfig(path=str(tokens)),))
    return base.model_copy(update={"data": data, "checkpoint": CHECKPOINTS})


@pytest.fixture(scope="module")
def train() -> Any:
    """Return a function that trains and returns the tokens of each step; programs are shared."""
    compiled: dict[Config, Any] = {}

    def build(config: Config) -> Program:
        program = build_here(config)
        key = program.config.model_copy(
            update={"run_dir": "any", "checkpoint": CHECKPOINTS, "seed": 0, "data": DataConfig()}
        )
        key = key.model_copy(
            update={
                "train": key.train.model_copy(update={"steps": 1, "max_bad_steps": 1}),
                "optim": key.optim.model_copy(update={"lr": 0.0}),
            }
        )
        if key not in compiled:
            compiled[key] = program.compiled
        program.__dict__["compiled"] = compiled[key]
        return program

    def run(config: Config, *, before: Callable[[int], None] = lambda _: None, **kw: Any) -> Any:
        seen: list[np.ndarray] = []
        put = Program.put

        def recorded(program: Program, batch: Any) -> Any:
            before(len(seen) + 1)
            seen.append(np.array(batch.tokens))
            return put(program, batch)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(training_run, "build_here", build)
            # A picture takes as long as all of a run's steps.
            patched.setattr(training_run, "draw", lambda _, path: path.touch())
            patched.setattr(Program, "put", recorded)
            training_run.train(config, **kw)
        return seen

    return run


def at(config: Config, run_dir: Path, **sections: Any) -> Config:
    """Return the config in another run folder, with some keys changed."""
    tree = config.model_dump(mode="json")
    for name, change in sections.items():
        tree[name] = {**tree[name], **change} if isinstance(change, dict) else change
    return Config.model_validate({**tree, "run_dir": str(run_dir)})


@pytest.fixture(scope="module")
def batches(train: Train, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train to the end, and return the tokens of each step and the run folder."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return train(at(config, run_dir)), run_dir


@pytest.fixture(scope="module")
def whole(batches: Any) -> Path:
    """A run to its end."""
    return batches[1]


def killed(whole: Path, run_dir: Path, step: int) -> Path:
    """Return the folder as a kill leaves it some steps after the checkpoint of `step`."""
    shutil.copytree(whole, run_dir)
    for folder in (run_dir / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (run_dir / "report.png").unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    return run_dir


def assert_same_run(found: Path, wanted: Path) -> None:
    """Compare the last checkpoints bit for bit, and all that metrics say of the steps."""
    table, line = diff(str(found), str(wanted))
    assert table is None, line
    assert read_saved(found).position == read_saved(wanted).position
    clock = ("tokens_per_s", "step_time_s")
    lines = [
        [{k: v for k, v in line.items() if k not in clock} for line in read(run / "metrics.jsonl")]
        for run in (found, wanted)
    ]
    assert lines[0] == lines[1]


def test_a_killed_run_goes_on_bit_for_bit(
    train: Train, config: Config, batches: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, whole = batches
    run_dir = killed(whole, tmp_path / "run", HALF)
    unfinished = run_dir / "checkpoints" / "step_5.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    after = train(at(config, run_dir))
    assert not unfinished.exists()
    # The next four batches.
    assert len(after) == STEPS - HALF == 4
    np.testing.assert_array_equal(after, tokens[HALF:])
    assert_same_run(run_dir, whole)
    assert (run_dir / "report.png").is_file()
    said = capsys.readouterr().out
    assert f"resuming from {run_dir}/checkpoints/step_4: 4 steps, 16 sequences, 368 tokens" in said
    assert "4 lines of steps that are taken again are dropped" in said
    assert "1 half-written lines are dropped" in said
    assert "trained 8 steps, 4 steps of them now" in said


def test_a_run_that_was_told_to_stop_goes_on_from_there(
    train: Train, config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_in_step_3(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run_dir = tmp_path / "run"
    train(at(config, run_dir), before=stop_in_step_3)
    assert read_saved(run_dir).position == (3, 3 * GLOBAL_BATCH, 3 * GLOBAL_BATCH * cases.LENGTH)
    assert "the same command resumes from here" in capsys.readouterr().out
    train(at(config, run_dir))
    assert_same_run(run_dir, whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(
    train: Train, config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = killed(whole, tmp_path / "run", 0)
    train(at(config, run_dir))
    assert "has no checkpoint, so the run starts anew" in capsys.readouterr().out
    assert_same_run(run_dir, whole)


def test_a_finished_run_says_so_and_compiles_nothing(
    config: Config, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_run, "build_here", lambda _: pytest.fail("compiles"))
    (whole / "report.png").unlink()
    training_run.train(at(config, whole))
    said = capsys.readouterr().out
    assert f"{whole} has reached step 8 of train.steps=8 already; " in said
    # A run that was killed while it drew has its picture then.
    assert (whole / "report.png").is_file()


def test_fewer_steps_than_a_killed_run_has_taken_and_lines_that_someone_removed(
    config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = killed(whole, tmp_path / "run", STEPS)
    metrics = run_dir / "metrics.jsonl"
    text = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([text[0], *text[3:6], *text[7:]]))
    training_run.train(at(config, run_dir, train={"steps": HALF}))
    said = capsys.readouterr().out
    assert "has reached step 8 of train.steps=4 already" in said
    assert "metrics.jsonl: 1 half-written lines are dropped" in said
    assert "metrics.jsonl lacks the lines of steps 2 to 3 and 7" in said
    assert (run_dir / "report.png").is_file()


def test_a_run_in_a_folder_that_is_in_use_is_refused_and_touches_nothing(
    config: Config, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "build_here", lambda _: pytest.fail("compiles"))
    run_dir = killed(whole, tmp_path / "run", HALF)
    unfinished = run_dir / "checkpoints" / "step_5.orbax-checkpoint-tmp"
    unfinished.mkdir()
    lock = Lock(run_dir)
    lock.take()
    before = {path: path.is_dir() or path.read_bytes() for path in run_dir.rglob("*")}
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
        training_run.train(at(config, run_dir))
    assert {path: path.is_dir() or path.read_bytes() for path in run_dir.rglob("*")} == before
    lock.free()
    # A refused change leaves it too, and so does no lock.
    with pytest.raises(UserError, match="seed=5"):
        training_run.train(at(config, run_dir, seed=5))
    assert unfinished.is_dir()
    assert not (run_dir / ".lock").exists()


@pytest.mark.parametrize(
    ("source", "model", "words"),
    [
        ("missing", {}, "init_from=.*missing is not there"),
        ("run", {}, "init_from=.*run is in run_dir=.*run; .*another run_dir"),
        ("run/checkpoints/step_4", {}, "step_4 is in run_dir="),
        ("whole", {"expert_hidden": 24}, r"write model.expert_hidden=\d+, as its run has it"),
        ("whole", {}, None),
    ],
)
def test_weights_that_a_run_cannot_start_from_are_refused_before_it_compiles(
    source: str,
    model: dict[str, int],
    words: str | None,
    config: Config,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "whole").symlink_to(whole)
    (tmp_path / "run" / "checkpoints" / "step_4").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    start = {"init_from": str(tmp_path / source)}
    started = at(config, tmp_path / "run", checkpoint=start, model=model)

    def compiled(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(training_run, "carry_out", compiled)
    with pytest.raises(UserError if words else AssertionError, match=words):
        training_run.train(started)


def test_a_change_that_is_refused_leaves_the_folder_as_it_was(
    train: Train, config: Config, whole: Path, tmp_path: Path
) -> None:
    run_dir = killed(whole, tmp_path / "run", HALF)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    changed = at(config, run_dir, seed=5, model={"top_k": 1})
    with pytest.raises(UserError, match=r"seed=5, and .*step_4 has seed=0(.|\n)*model.top_k=1"):
        train(changed)
    other = write_folder(tmp_path / "other", [[7] * 900], vocab_size=cases.VOCAB)
    with pytest.raises(UserError, match=r"other tokens.*--allow-change data"):
        train(at(config, run_dir, data={"sources": [{"path": str(other)}]}))
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_an_allowed_change_is_said_and_takes_effect(
    train: Train, config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = killed(whole, tmp_path / "run", HALF)
    train(at(config, run_dir, seed=5, optim={"lr": 0.5}), allowed=["seed"])
    said = capsys.readouterr().out
    assert "changed: seed 0 -> 5\n" in said
    assert "changed: optim.lr 0.01 -> 0.5\n" in said
    old, new = read(whole / "metrics.jsonl"), read(run_dir / "metrics.jsonl")
    assert [line["lr"] for line in new[:HALF]] == [line["lr"] for line in old[:HALF]]
    assert new[HALF]["lr"] == pytest.approx(50 * old[HALF]["lr"])
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"] == STEPS
    assert "lr: 0.5" in (run_dir / "config.yaml").read_text()


def test_bad_steps_end_a_run_and_what_it_says_to_do_helps(
    train: Train, config: Config, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # So large a step leaves weights that are finite, and no later step that is.
    nonfinite = at(
        config, run_dir, optim={"lr": 1e30}, train={"max_bad_steps": 3}, checkpoint={"every": 1}
    )
    broken = run_dir / "checkpoints" / "step_1"
    said = rf"from {broken}, and no step since was good.* remove that folder, and it starts anew"
    with pytest.raises(UserError, match=rf"max_bad_steps=3.*step 4 .*embedding.weight.*{said}"):
        train(nonfinite)
    assert read_saved(run_dir).position.step == 1
    lines = read(run_dir / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert "bad_leaves" not in lines[0]
    shutil.rmtree(broken)
    train(at(config, run_dir, train={"steps": 3}))
    assert not any("bad_leaves" in line for line in read(run_dir / "metrics.jsonl"))
    assert read_saved(run_dir).position.step == 3


def test_a_run_starts_from_the_weights_of_another(
    train: Train, config: Config, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    start = {"init_from": str(whole), "every": 0}
    train(at(config, run_dir, train={"steps": 1}, optim={"lr": 0.0}, checkpoint=start))
    first = read(run_dir / "metrics.jsonl")[0]
    program = build_here(at(config, run_dir))
    shapes = program.abstract_arguments()[0].main | program.abstract_arguments()[0].expert_bias
    found, wanted = restore_weights(run_dir, shapes), restore_weights(whole, shapes)
    for name, leaf in program.layout.parameters.items():
        assert leaf.shape == wanted[name].shape
        # A rate of 0 keeps them, so they are those that it started from.
        np.testing.assert_array_equal(found[name], wanted[name])
    assert first["tokens"] == GLOBAL_BATCH * cases.LENGTH
    assert first["loss"] < read(whole / "metrics.jsonl")[0]["loss"]


def in_processes(number: int, config: Config, folder: Path) -> Path:
    """Train in so many processes, and return the run folder."""
    (folder / "config.yaml").write_text(to_yaml(config))
    command = ["launch", "local", "--processes", str(number), "--", "train"]
    done = subprocess.run(
        [sys.executable, "-m", "olmo_jax.cli", *command, str(folder / "config.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(config.run_dir)


def assert_parity(found: Path, wanted: Path) -> None:
    """Compare what two runs measured: FP32 sums in another order, 1e-7 and less was measured."""
    pairs = list(zip(read(found / "metrics.jsonl"), read(wanted / "metrics.jsonl"), strict=True))
    assert len(pairs) == STEPS
    for line, other in pairs:
        assert [line[key] for key in ("step", "tokens", "skipped", "lr", "max_load")] == [
            other[key] for key in ("step", "tokens", "skipped", "lr", "max_load")
        ]
        tolerance = 1e-6 if line["step"] == 1 else 1e-5
        for key in ("loss", "z_loss", "balance_loss", "router_z_loss", "grad_norm"):
            assert line[key] == pytest.approx(other[key], rel=tolerance), (line["step"], key)


@pytest.mark.matrix
def test_two_processes_train_as_one_does_and_either_goes_on_from_the_other(
    train: Train, config: Config, batches: Any, tmp_path: Path
) -> None:
    tokens, whole = batches
    run_dir = in_processes(2, at(config, tmp_path / "two"), tmp_path)
    assert_parity(run_dir, whole)
    after = train(at(config, killed(run_dir, tmp_path / "one", HALF)))
    np.testing.assert_array_equal(after, tokens[HALF:])
    assert_parity(tmp_path / "one", whole)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"data": 2, "expert": 2}, {"fsdp": 4}], ids=str)
def test_four_processes_train_as_one_does(
    mesh: dict[str, int], train: Train, config: Config, tmp_path: Path
) -> None:
    other = at(config, tmp_path / "one", mesh={"expert": 1} | mesh)
    train(other)
    assert_parity(in_processes(4, at(other, tmp_path / "four"), tmp_path), tmp_path / "one")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"expert": 4}, {}),
        ({"expert": 1, "data": 2, "fsdp": 2}, {}),
        ({"expert": 1, "fsdp": 2}, {"parallel": {"method": "fsdp"}}),
        ({"expert": 2, "data": 2}, {"parallel": {"shard_optimizer": False}}),
        ({"expert": 1}, {"train": {"microbatch": 4}}),
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_same_tokens_on_another_mesh(
    mesh: dict[str, int],
    others: dict[str, Any],
    train: Train,
    config: Config,
    batches: Any,
    tmp_path: Path,
) -> None:
    tokens, whole = batches
    run_dir = killed(whole, tmp_path / "run", HALF)
    after = train(at(config, run_dir, mesh=mesh, **others))
    np.testing.assert_array_equal(after, tokens[HALF:])
    assert_parity(run_dir, whole)
