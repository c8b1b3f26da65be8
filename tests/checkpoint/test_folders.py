"""Which folders count as checkpoints, and which go."""

import json
from pathlib import Path

import pytest

from olmo_jax.checkpoint import RUN_ID, folders, manifest
from olmo_jax.errors import UserError


def make(run_dir: Path, name: str, *, mark: bool = True, manifest: bool = True) -> Path:
    folder = run_dir / "checkpoints" / name
    (folder / "manifest").mkdir(parents=True)
    if mark:
        (folder / "commit_success.txt").touch()
    if manifest:
        (folder / "manifest" / "manifest.json").touch()
    return folder


def test_only_what_is_whole_counts_and_the_greatest_step_is_the_last(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        make(tmp_path, f"step_{step}")
    make(tmp_path, "step_11", mark=False)
    make(tmp_path, "step_12", manifest=False)
    make(tmp_path, "step_13.orbax-checkpoint-tmp")
    make(tmp_path, "step_1x")
    make(tmp_path, "step_010")
    assert folders.steps(tmp_path) == [2, 9, 10]
    assert folders.find(tmp_path).name == "step_10"
    assert folders.find(tmp_path, 9).name == "step_9"
    assert folders.find(tmp_path / "checkpoints" / "step_2").name == "step_2"


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, "step_3", mark=False)
    make(tmp_path, "step_4.orbax-checkpoint-tmp")
    checkpoints = tmp_path / "checkpoints"
    foreign = [checkpoints / "step_100", checkpoints / "keep_me.orbax-checkpoint-tmp-x"]
    for folder in foreign:
        (folder / "mydata").mkdir(parents=True)
    copy = make(tmp_path, "step_003", mark=False)
    stay = [make(tmp_path, "step_2"), make(tmp_path, "notes"), copy, *foreign]
    stay.append(checkpoints / "a.txt")
    stay[-1].touch()
    folders.remove_unfinished(tmp_path)
    assert sorted((tmp_path / "checkpoints").iterdir()) == sorted(stay)


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        folders.find(tmp_path)
    make(tmp_path, "step_2")
    with pytest.raises(UserError, match="has no checkpoint of step 5; it has 2; use one"):
        folders.find(tmp_path, 5)


def test_a_path_that_is_no_run_folder_is_told_with_the_one_to_name(tmp_path: Path) -> None:
    root = make(tmp_path, "step_2").parent
    with pytest.raises(UserError, match=f"inside a run folder; .*; name {tmp_path}$"):
        folders.find(root)
    with pytest.raises(UserError, match=f"^{tmp_path} has no checkpoint of step 99; it has 2"):
        folders.find(root / "step_99")
    with pytest.raises(UserError, match=f"of step 2, and step 6 is asked for; .* {tmp_path}$"):
        folders.find(root / "step_2", 6)
    assert folders.find(root / "step_2", 2) == root / "step_2"


def test_a_damaged_checkpoint_is_told_with_what_the_run_does_without_it(tmp_path: Path) -> None:
    damaged = folders.path_of(make(tmp_path, "step_4"))
    with pytest.raises(UserError, match=f"remove or rename {damaged} and the .* starts anew$"):
        manifest.read(damaged)
    make(tmp_path, "step_2")
    with pytest.raises(UserError, match=f"{damaged} and the same command resumes from step 2$"):
        manifest.read(damaged)


@pytest.mark.parametrize(
    ("there", "newest", "keep", "keep_every", "gone"),
    [
        ([1, 2, 3, 4], 4, 2, 0, [1, 2]),
        ([1, 2, 3, 4], 4, 1, 2, [1, 3]),
        ([5, 10, 15, 20, 25], 25, 2, 10, [5, 15]),
        ([1, 2], 2, 3, 0, []),
        ([1, 2, 3, 9], 3, 1, 0, [1, 2]),
    ],
)
def test_the_newest_stay_and_every_nth(there, newest, keep, keep_every, gone) -> None:
    assert folders.superfluous(there, newest, keep=keep, keep_every=keep_every) == gone


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gs://bucket/run", "gs://bucket/run needs the package gcsfs"),
        (Path("s3://bucket/run"), "needs the package s3fs"),
        ("hdfs://host/run", "they lie in folders, gs:// and s3://"),
    ],
)
def test_a_bucket_that_cannot_be_reached_is_told(monkeypatch, path, words) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        folders.steps(path)
    assert words in str(error.value)


def test_a_bucket_keeps_both_slashes(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert (
        str(folders.folder_of(Path("gs://bucket/run"), 3)) == "gs://bucket/run/checkpoints/step_3"
    )


def of_run(run_dir: Path, step: int, run_id: str | None) -> Path:
    """Make a whole checkpoint that a run with this id wrote, None for an old version."""
    folder = make(run_dir, f"step_{step}")
    facts = {} if run_id is None else {RUN_ID: run_id}
    (folder / "manifest" / "manifest.json").write_text(json.dumps({"facts": facts}))
    return folder


@pytest.mark.parametrize(
    ("known", "runs", "own"),
    [
        ("a", {1: "a", 2: "b", 3: None, 4: "a"}, [1, 4]),
        ("a", {7: "b"}, []),
        # A run of an old version has no id.
        (None, {1: None, 2: None}, [1, 2]),
        (None, {1: None, 2: "b"}, [1]),
        # Checkpoints that were moved without the rest of their run folder.
        (None, {1: "a", 2: "a"}, [1, 2]),
        (None, {1: "a", 2: "b"}, [1]),
    ],
)
def test_a_checkpoint_belongs_to_a_run_by_its_id(
    tmp_path: Path, known: str | None, runs: dict[int, str | None], own: list[int]
) -> None:
    if known is not None:
        (tmp_path / RUN_ID).write_text(f"{known}\n")
    for step, run_id in runs.items():
        of_run(tmp_path, step, run_id)
    assert folders.steps(tmp_path) == own
    assert folders.foreign_steps(tmp_path) == [step for step in runs if step not in own]
    if own:
        assert folders.find(tmp_path).name == f"step_{own[-1]}"
    # Its folder itself names any.
    for step in runs:
        folder = tmp_path / "checkpoints" / f"step_{step}"
        assert folders.find(folder) == folders.path_of(folder)


def test_a_damaged_checkpoint_is_the_runs_own_and_a_replaced_one_is_read_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / RUN_ID).write_text("a")
    damaged = of_run(tmp_path, 3, "b")
    assert folders.steps(tmp_path) == []
    (damaged / "manifest" / "manifest.json").write_text("{")
    assert folders.steps(tmp_path) == [3]


def test_nothing_is_written_over_a_link_or_another_runs_checkpoint(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).write_text("a")
    own, foreign = of_run(tmp_path, 1, "a"), of_run(tmp_path, 2, "b")
    (tmp_path / "checkpoints" / "step_3").symlink_to(own)
    folders.refuse_overwriting(folders.path_of(own))
    with pytest.raises(UserError, match=r"step_2 is a checkpoint of another run; .* move it away"):
        folders.refuse_overwriting(folders.path_of(foreign))
    with pytest.raises(UserError, match=r"step_3 is a link; .* move it away"):
        folders.refuse_overwriting(folders.folder_of(tmp_path, 3))


def test_what_lies_where_a_run_will_write_is_refused_before_its_steps(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).write_text("a")
    of_run(tmp_path, 1, "a")
    of_run(tmp_path, 7, "b")
    folders.refuse_in_the_way(tmp_path, 1, 6)
    folders.refuse_in_the_way(tmp_path, 7, 9)
    with pytest.raises(UserError, match=r"step_7 is a checkpoint of another run; .* move it away"):
        folders.refuse_in_the_way(tmp_path, 1, 7)


def test_what_a_link_leads_to_is_never_removed_as_unfinished(tmp_path: Path) -> None:
    away = make(tmp_path / "large", "step_3", mark=False)
    root = make(tmp_path / "run", "step_2").parent
    for name in ("step_3", "step_4.orbax-checkpoint-tmp"):
        (root / name).symlink_to(away)
    folders.remove_unfinished(tmp_path / "run")
    assert sorted(path.name for path in root.iterdir()) == [
        "step_2",
        "step_3",
        "step_4.orbax-checkpoint-tmp",
    ]
    assert (away / "manifest" / "manifest.json").exists()


def test_a_path_that_orbax_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a backslash, which Orbax takes for a sign"):
        folders.steps(tmp_path / "a\\b")
