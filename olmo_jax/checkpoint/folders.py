"""The folders of a run's checkpoints: which are whole, which may go."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from etils import epath

from olmo_jax.checkpoint import manifest
from olmo_jax.errors import UserError

FOLDER = "checkpoints"
STATE = "state"
_PREFIX = "step_"
_COMMITTED = "commit_success.txt"  # Orbax's last file, before the folder gets its name
_UNFINISHED = ".orbax-checkpoint-tmp"
_FILE_SYSTEMS = {"gs": "gcsfs", "s3": "s3fs"}

RunDir = str | os.PathLike[str]


def path_of(path: RunDir) -> epath.Path:
    """Return a path that Orbax takes: absolute, or of a bucket.

    Raises: UserError for a bucket whose file system is not installed, or of no known kind.
    """
    text = os.fspath(path)
    # pathlib makes one slash of two.
    scheme, separator, rest = text.partition(":/")
    if not separator or "/" in scheme:
        return epath.Path(Path(text).absolute())
    _check_bucket(text, scheme)
    return epath.Path(f"{scheme}://{rest.lstrip('/')}")


def _check_bucket(given: str, scheme: str) -> None:
    if scheme not in _FILE_SYSTEMS:
        raise UserError(
            f"{given} is of a kind that checkpoints cannot lie in; they lie in folders, gs:// and "
            "s3://; use one of these"
        )
    package = _FILE_SYSTEMS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{given} needs the package {package}, which is not installed; install it, or use a "
            "local folder"
        )


def root_of(run_dir: RunDir) -> epath.Path:
    """Return the folder of a run's checkpoints."""
    return path_of(run_dir) / FOLDER


def folder_of(run_dir: RunDir, step: int) -> epath.Path:
    """Return the folder of a step's checkpoint."""
    return root_of(run_dir) / f"{_PREFIX}{step}"


def step_of(folder: epath.Path) -> int | None:
    """Return the step that a checkpoint's folder is named after, None for any other folder."""
    number = folder.name.removeprefix(_PREFIX)
    named = folder.name.startswith(_PREFIX) and number.isascii() and number.isdigit()
    return int(number) if named else None


def is_whole(folder: epath.Path) -> bool:
    """Say whether a checkpoint was written to its end: mark and manifest are there."""
    return (folder / _COMMITTED).exists() and manifest.path_in(folder).exists()


def num_bytes(folder: epath.Path) -> int:
    """Return what the files below a folder hold."""
    return sum(
        num_bytes(path) if path.is_dir() else path.stat().length for path in folder.iterdir()
    )


def _inside(run_dir: RunDir) -> list[epath.Path]:
    root = root_of(run_dir)
    return list(root.iterdir()) if root.is_dir() else []


def steps(run_dir: RunDir) -> list[int]:
    """Return the steps of the whole checkpoints, ascending."""
    found = [(step_of(folder), folder) for folder in _inside(run_dir)]
    return sorted(step for step, folder in found if step is not None and is_whole(folder))


def find(path: RunDir, step: int | None = None) -> epath.Path:
    """Return the folder of a run's checkpoint, the last one if no step is given.

    `path` may be that folder itself.

    Raises: UserError if there is none.
    """
    folder = path_of(path)
    if step is None and step_of(folder) is not None and is_whole(folder):
        return folder
    there = steps(path)
    if not there:
        raise UserError(
            f"{folder} holds no checkpoint: {FOLDER}/ has no {_PREFIX}<number> that was written to "
            "its end; a run writes one every checkpoint.every steps and when it ends or is "
            "stopped; name the folder of such a run"
        )
    if step is not None and step not in there:
        listing = ", ".join(map(str, there))
        raise UserError(f"{folder} has no checkpoint of step {step}; it has {listing}; use one")
    return folder_of(path, there[-1] if step is None else step)


def remove_unfinished(run_dir: RunDir) -> None:
    """Remove what writers left that were killed, and removals that were."""
    for folder in _inside(run_dir):
        unmarked = step_of(folder) is not None and not (folder / _COMMITTED).exists()
        if folder.is_dir() and (unmarked or _UNFINISHED in folder.name):
            folder.rmtree()


def remove(folder: epath.Path) -> None:
    """Remove a checkpoint: its mark first, so that no part of it is taken for a whole one."""
    (folder / _COMMITTED).unlink()
    folder.rmtree()


def superfluous(there: Iterable[int], newest: int, *, keep: int, keep_every: int) -> list[int]:
    """Return the steps that may go once `newest` is whole: all but `keep` and every keep_every-th.

    What is ahead of `newest` stays: another attempt of the run wrote it.
    """
    past = sorted(step for step in there if step <= newest)
    kept_forever = {step for step in past if keep_every and step % keep_every == 0}
    return [step for step in past[:-keep] if step not in kept_forever]
