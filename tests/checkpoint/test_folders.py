"""Which folders count as checkpoints, and which go."""

from pathlib import Path

import pytest

from olmo_jax.checkpoint import folders, manifest
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
    with pytest.raises(UserError, match=f"{damaged} and the same command goes on from step 2$"):
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
