"""The folders of a run's checkpoints: which are whole, which may go."""

import importlib.util
import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from etils import epath

from olmo_jax.errors import UserError
from olmo_jax.file_names import CHECKPOINTS

RUN_ID = "run_id"
"""In a run folder: names its run. A checkpoint has it under this name among its facts."""
STATE, MANIFEST = "state", "manifest"
MANIFEST_FILE = "manifest.json"
_PREFIX = "step_"
_COMMITTED = "commit_success.txt"  # Orbax's last file, before the folder gets its name
_PARTS = (STATE, MANIFEST, "_CHECKPOINT_METADATA")
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
        absolute = Path(text).absolute()
        if "\\" in str(absolute):
            raise UserError(
                f"{absolute} has a backslash, which Orbax takes for a sign of its own; checkpoints "
                "lie in folders without; rename the folder"
            )
        return epath.Path(absolute)
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
    return path_of(run_dir) / CHECKPOINTS


def folder_of(run_dir: RunDir, step: int) -> epath.Path:
    """Return the folder of a step's checkpoint."""
    return root_of(run_dir) / f"{_PREFIX}{step}"


def step_of(folder: epath.Path) -> int | None:
    """Return the step that a checkpoint's folder is named after, None for any other folder.

    Only the name that a run writes counts: step_004 is a user's copy of step_4.
    """
    return _step_in(folder.name)


def _step_in(name: str) -> int | None:
    number = name.removeprefix(_PREFIX)
    if not (name.startswith(_PREFIX) and number.isascii() and number.isdigit()):
        return None
    return int(number) if str(int(number)) == number else None


def manifest_in(folder: epath.Path) -> epath.Path:
    """Return where a checkpoint's manifest lies."""
    return folder / MANIFEST / MANIFEST_FILE


def is_whole(folder: epath.Path) -> bool:
    """Say whether a checkpoint was written to its end: mark and manifest are there."""
    return (folder / _COMMITTED).exists() and manifest_in(folder).exists()


def num_bytes(folder: epath.Path) -> int:
    """Return what the files below a folder hold."""
    return sum(
        num_bytes(path) if path.is_dir() else path.stat().length for path in folder.iterdir()
    )


def _inside(root: epath.Path) -> list[epath.Path]:
    return list(root.iterdir()) if root.is_dir() else []


def _whole_in(root: epath.Path) -> dict[int, epath.Path]:
    """Return the whole checkpoints by step, ascending, whichever run wrote them."""
    found = [(step_of(folder), folder) for folder in _inside(root)]
    return dict(sorted((step, at) for step, at in found if step is not None and is_whole(at)))


def _steps_in(root: epath.Path) -> list[int]:
    whole = _whole_in(root)
    run_id = _run_id(root.parent, whole.values())
    return [step for step, folder in whole.items() if _is_of(run_id, folder)]


def steps(run_dir: RunDir) -> list[int]:
    """Return the steps of the run's own whole checkpoints, ascending."""
    return _steps_in(root_of(run_dir))


def foreign_steps(run_dir: RunDir) -> list[int]:
    """Return the steps of whole checkpoints that another run wrote, ascending."""
    root = root_of(run_dir)
    return sorted(_whole_in(root).keys() - _steps_in(root))


def run_id_of(run_dir: RunDir) -> str | None:
    """Return the id of the run in a folder; None if it has none, as runs of old versions.

    Where the folder does not say it, its checkpoints do: the first of them, if all have one.
    """
    root = root_of(run_dir)
    return _run_id(root.parent, _whole_in(root).values())


def _run_id(run_dir: epath.Path, whole: Iterable[epath.Path]) -> str | None:
    path = run_dir / RUN_ID
    if path.exists():
        return path.read_text().strip() or None
    found = [_recorded(folder) for folder in whole]
    ids = [run_id for run_id, readable in found if readable]
    return None if None in ids or not ids else ids[0]


def _is_of(run_id: str | None, folder: epath.Path) -> bool:
    """Say whether a run wrote a checkpoint; a damaged one is its own, which it must not skip."""
    found, readable = _recorded(folder)
    return not readable or found == run_id


def _recorded(folder: epath.Path) -> tuple[str | None, bool]:
    """Return the id of the run that wrote a whole checkpoint, and whether its manifest is read."""
    path = manifest_in(folder)
    try:
        stat = path.stat()
    except OSError:
        return None, False
    return _id_in(path, stat.mtime, stat.length)


@lru_cache(maxsize=4096)
def _id_in(path: epath.Path, mtime: int, length: int) -> tuple[str | None, bool]:
    """Read each manifest once: `mtime` and `length` tell whether it was replaced."""
    del mtime, length
    try:
        return json.loads(path.read_text())["facts"].get(RUN_ID), True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, False


def way_on(folder: epath.Path) -> str:
    """Return what to do about a checkpoint that cannot be used."""
    others = [step for step in _steps_in(folder.parent) if step != step_of(folder)]
    then = f"resumes from step {others[-1]}" if others else "starts anew"
    return f"remove or rename {folder} and the same command {then}"


def find(path: RunDir, step: int | None = None) -> epath.Path:
    """Return the folder of a run's checkpoint, the last one if no step is given.

    `path` may be that folder itself.

    Raises: UserError if there is none, or if `path` is another folder of a run.
    """
    folder = path_of(path)
    named = step_of(folder)
    if named is not None and is_whole(folder):
        return _only(folder, named, step)
    there = steps(path)
    if not there and named is not None and folder.parent.name == CHECKPOINTS:
        return find(folder.parent.parent, named)
    if not there and folder.name == CHECKPOINTS and _steps_in(folder):
        raise UserError(
            f"{folder} is inside a run folder; a run folder or the folder of one step is needed; "
            f"name {folder.parent}"
        )
    if not there:
        raise UserError(
            f"{folder} holds no checkpoint: {CHECKPOINTS}/ has no {_PREFIX}<number> that was "
            "written to its end; a run writes one every checkpoint.every steps and when it ends "
            "or is stopped; name the folder of such a run"
        )
    if step is not None and step not in there:
        listing = ", ".join(map(str, there))
        raise UserError(f"{folder} has no checkpoint of step {step}; it has {listing}; use one")
    return folder_of(path, there[-1] if step is None else step)


def _only(folder: epath.Path, named: int, step: int | None) -> epath.Path:
    if step in (None, named):
        return folder
    raise UserError(
        f"{folder} is the checkpoint of step {named}, and step {step} is asked for; a step is "
        f"looked for in a run folder; name {folder.parent.parent}"
    )


def remove_unfinished(run_dir: RunDir) -> None:
    """Remove what writers left that were killed, and removals that were; nothing of a user's."""
    for folder in _inside(root_of(run_dir)):
        if folder.is_dir() and not is_linked(folder) and _is_unfinished(folder):
            folder.rmtree()


def _is_unfinished(folder: epath.Path) -> bool:
    name, mark, _ = folder.name.partition(_UNFINISHED)
    if mark:
        return _step_in(name) is not None
    return step_of(folder) is not None and not (folder / _COMMITTED).exists() and _has_part(folder)


def _has_part(folder: epath.Path) -> bool:
    return any((folder / part).exists() for part in _PARTS)


def refuse_overwriting(folder: epath.Path) -> None:
    """Refuse to write where something lies that no run wrote: a write replaces what is there.

    Raises: UserError.
    """
    run_id = run_id_of(folder.parent.parent)
    if is_linked(folder) or (is_whole(folder) and not _is_of(run_id, folder)):
        what = "a link" if is_linked(folder) else "a checkpoint of another run"
        raise UserError(
            f"{folder} is {what}; a checkpoint of step {step_of(folder)} is written there, and "
            "only folders of the run's own are replaced; move it away"
        )
    if folder.exists() and not _has_part(folder) and not (folder.is_dir() and not _inside(folder)):
        raise UserError(
            f"{folder} is there and is no checkpoint; a checkpoint of step {step_of(folder)} is "
            "written there, and nothing else is removed for it; move it away"
        )


def refuse_in_the_way(run_dir: RunDir, done: int, last: int) -> None:
    """Refuse as `refuse_overwriting` does what lies where a run after step `done` may write.

    Raises: UserError.
    """
    for folder in _inside(root_of(run_dir)):
        step = step_of(folder)
        if step is not None and done < step <= last:
            refuse_overwriting(folder)


def is_linked(folder: epath.Path) -> bool:
    """Say whether a folder lies elsewhere, and only a link to it is here."""
    return os.path.islink(os.fspath(folder))


def remove(folder: epath.Path) -> None:
    """Remove a checkpoint: its mark first, so that no part of it is taken for a whole one."""
    # A process that is killed in between leaves a folder without a mark, which `remove_unfinished`
    # takes.
    (folder / _COMMITTED).unlink()
    folder.rmtree()


def superfluous(there: Iterable[int], newest: int, *, keep: int, keep_every: int) -> list[int]:
    """Return the steps that may go once `newest` is whole: all but `keep` and every keep_every-th.

    What is ahead of `newest` stays: another attempt of the run wrote it.
    """
    # keep=2, keep_every=100, newest=270 of 100 150 200 250 260 270 300: 150 and 250 go. 300 stays,
    # and 260 and 270 are the newest two of those up to `newest`.
    past = sorted(step for step in there if step <= newest)
    kept_forever = {step for step in past if keep_every and step % keep_every == 0}
    return [step for step in past[:-keep] if step not in kept_forever]
