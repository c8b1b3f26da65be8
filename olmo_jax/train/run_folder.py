"""The run folder: what a run leaves, and what later commands find there."""

import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from olmo_jax.config import Config
from olmo_jax.config_file import load, to_yaml
from olmo_jax.errors import UserError
from olmo_jax.file_names import CHECKPOINTS, CONFIG, PATTERN_SIGNS, TOKENIZER

DEVICE_TABLE = "devices.txt"
METRICS = "metrics.jsonl"
REPORT = "report.png"
LOCK = ".lock"


def refuse_unusable(run_dir: Path) -> None:
    """Refuse a path that a checkpoint cannot be written to, before anything is.

    Orbax looks for what its processes wrote by a pattern that begins with the path.

    Raises: UserError.
    """
    path = str(run_dir.absolute())
    if found := [sign for sign in PATTERN_SIGNS if sign in path]:
        raise UserError(
            f"run_dir={run_dir} is {path} and has {' '.join(found)}; Orbax takes "
            f"{' '.join(PATTERN_SIGNS)} in a path for a pattern of several; write a run_dir "
            "without"
        )


def refuse_foreign(run_dir: Path) -> None:
    """Refuse a file, and a folder with what a run would write but no run's config.

    Raises: UserError.
    """
    refuse_unusable(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir={run_dir} is a file; a run writes a folder; write another name")
    if (run_dir / CONFIG).exists():
        return
    for name in (METRICS, CHECKPOINTS, REPORT):
        if (run_dir / name).exists():
            raise UserError(
                f"run_dir={run_dir} holds {name} and no {CONFIG}, so it is no run of this program; "
                "a run resumes in its own folder or starts in a new one; write another run_dir=..."
            )


def create(config: Config, device_table: str, tokenizer: Path | None) -> Path:
    """Write what is known before the first step, over what an earlier start wrote.

    Raises: UserError if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace(run_dir / CONFIG, to_yaml(config).encode())
        replace(run_dir / DEVICE_TABLE, f"{device_table}\n".encode())
        if tokenizer is not None:
            replace(run_dir / TOKENIZER, tokenizer.read_bytes())
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}); name a folder that can be"
        ) from None
    return run_dir


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a process that is killed leaves the old or the new one, whole."""
    # Written aside and renamed: a rename is atomic, and fsync comes before it, so that the name
    # never stands for a file whose content is not on the disk.
    new = path.with_name(f".{path.name}.new")
    try:
        # Left by a kill, or a link of somebody's: nothing is written through it.
        new.unlink(missing_ok=True)
        with new.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        # A full disk wants the part back.
        with suppress(OSError):
            new.unlink()
        raise


class Lock:
    """Holds a run folder for one process; whatever ends the process frees it.

    The lock is that of the system on an open file, and the file says for whom it is held. It goes
    when the lock does, and so does a folder that was made for it and holds nothing else.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / LOCK
        self._file: int | None = None
        self._made = False

    def take(self) -> str:
        """Take the lock, or go on without one where the file system has none.

        Raises: UserError if another process has it, or if the folder cannot be written.
        """
        try:
            self._made = not self._run_dir.exists()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._file = self._taken()
        except OSError as error:
            raise UserError(
                f"run_dir={self._run_dir} cannot be written ({error.strerror}); name a folder that "
                "can be"
            ) from None
        return ""

    def _taken(self) -> int | None:
        """Return the file that is held; None if it was removed by its last holder meanwhile."""
        # The holder removes the file when it ends. Without `_is_there` two could hold the folder:
        #
        #     A   holds the lock                  unlink, close
        #     B                      open                        flock: a file that has no name
        #     C                                           open, flock: a new file of that name
        #
        # B compares its file with what has the name now, lets go, and opens that one.
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._linked() from None
        try:
            if os.fstat(file).st_nlink > 1:
                raise self._linked()
            self._lock(file)
            # Held by nobody that comes later, who makes a new file.
            if not self._is_there(file):
                os.close(file)
                return None
            now = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} on {socket.gethostname()} (since {now})".encode(), 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace") or "unknown"
            raise UserError(
                f"run_dir={self._run_dir} is in use by process {holder}; a folder has one run at a "
                "time; wait for it, stop it, or write another run_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _linked(self) -> UserError:
        return UserError(
            f"{self._path} is a link; a run writes into a lock of its own, and into nothing that "
            "a link leads to; remove it"
        )

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.lstat())
        except OSError as error:
            # ESTALE: a network's file system, where another host removed it.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            return False

    def refuse_lost(self) -> None:
        """Refuse to write on once the folder of that name is not the one that is held.

        Raises: UserError if it was removed or replaced; never where no lock is held.
        """
        if self._file is None or self._is_there(self._file):
            return
        raise UserError(
            f"run_dir={self._run_dir} or its {LOCK} was removed or replaced while this run wrote "
            "there; a run writes into its own folder only, so nothing more is written; start it "
            "again, in another run_dir if a run is in that one now"
        )

    def free(self) -> None:
        """Free the lock, if it is held; another run's lock in its place stays."""
        if self._file is None:
            return
        # The name goes before the lock: who opens the file after this makes a new one.
        with suppress(OSError):
            if self._is_there(self._file):
                self._path.unlink()
                if self._made:
                    # Refused if it holds anything.
                    self._run_dir.rmdir()
        os.close(self._file)
        self._file = None


_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def load_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that a run was started with.

    Raises: UserError if the folder holds no run with weights.
    """
    if not (run_dir / CONFIG).is_file():
        raise UserError(
            f"{run_dir} holds no run: there is no {CONFIG} in it; name the run_dir that "
            "`olmo-jax train` wrote"
        )
    if not any((run_dir / CHECKPOINTS).glob("step_*")):
        raise UserError(
            f"{run_dir} holds no weights: there is no {CHECKPOINTS}/step_* in it; name a run that "
            "has ended or was stopped with one Ctrl-C"
        )
    return load(run_dir / CONFIG, overrides)


def contents(run_dir: Path) -> list[str]:
    """Return the names of what a run left in its folder."""
    names = (CONFIG, DEVICE_TABLE, TOKENIZER, METRICS, REPORT)
    found = [name for name in names if (run_dir / name).exists()]
    steps = [path.name for path in run_dir.glob(f"{CHECKPOINTS}/step_*")]
    steps.sort(key=lambda name: (len(name), name))
    return found + [f"{CHECKPOINTS}/{name}" for name in steps]
