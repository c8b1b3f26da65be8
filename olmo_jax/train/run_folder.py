"""The run folder: what a run leaves, and what later commands find there."""

import shutil
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


def refuse_used(run_dir: Path) -> None:
    """Refuse a folder that holds a run already.

    Raises: UserError.
    """
    for name in (METRICS, CHECKPOINTS, REPORT):
        if (run_dir / name).exists():
            raise UserError(
                f"run_dir={run_dir} holds a run already ({name} is there); a run starts in a "
                "folder of its own; write another run_dir=..., or remove that folder"
            )
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir={run_dir} is a file; a run writes a folder; write another name")


def create(config: Config, device_table: str, tokenizer: Path | None) -> Path:
    """Write what is known before the first step, and return the folder.

    Raises: UserError if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        (run_dir / DEVICES).write_text(device_table + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, run_dir / TOKENIZER)
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}); name a folder that can be"
        ) from None
    return run_dir


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
    return found + [str(path.relative_to(run_dir)) for path in run_dir.glob(f"{CHECKPOINTS}/*")]
