"""The run folder: what a run leaves, and what later commands find there."""

import os
from collections.abc import Sequence
from pathlib import Path

from olmo_jax.config import Config, load, to_yaml
from olmo_jax.errors import UserError

CONFIG = "config.yaml"
DEVICES = "devices.txt"
METRICS = "metrics.jsonl"
REPORT = "report.png"
TOKENIZER = "tokenizer.json"
CHECKPOINTS = "checkpoints"


def refuse_foreign(run_dir: Path) -> None:
    """Refuse a file, and a folder with what a run would write but no run's config.

    Raises: UserError.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir={run_dir} is a file; a run writes a folder; write another name")
    if (run_dir / CONFIG).exists():
        return
    for name in (METRICS, CHECKPOINTS, REPORT):
        if (run_dir / name).exists():
            raise UserError(
                f"run_dir={run_dir} holds {name} and no {CONFIG}, so it is no run of this program; "
                "a run goes on in its own folder or starts in a new one; write another run_dir=..."
            )


def create(config: Config, device_table: str, tokenizer: Path | None) -> Path:
    """Write what is known before the first step, over what an earlier start wrote.

    Raises: UserError if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace(run_dir / CONFIG, to_yaml(config).encode())
        replace(run_dir / DEVICES, f"{device_table}\n".encode())
        if tokenizer is not None:
            replace(run_dir / TOKENIZER, tokenizer.read_bytes())
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}); name a folder that can be"
        ) from None
    return run_dir


def replace(path: Path, content: bytes) -> None:
    """Put a file in another's place: whoever is killed meanwhile leaves one of the two, whole."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


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
    names = (CONFIG, DEVICES, TOKENIZER, METRICS, REPORT)
    found = [name for name in names if (run_dir / name).exists()]
    steps = [path.name for path in run_dir.glob(f"{CHECKPOINTS}/step_*")]
    steps.sort(key=lambda name: (len(name), name))
    return found + [f"{CHECKPOINTS}/{name}" for name in steps]
