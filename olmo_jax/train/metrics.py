"""The lines of metrics.jsonl: one a step."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from olmo_jax.errors import UserError
from olmo_jax.train.run_folder import replace

Line = dict[str, Any]


class Evaluation(NamedTuple):
    """Mean cross entropy per counted token of the held-out batches."""

    loss: float
    counted: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf if self.loss > 0 else math.nan


def evaluation_of(parts: list[Mapping[str, Any]]) -> Evaluation:
    """Return the mean over all batches from each one's `ce_sum` and `counted`."""
    counted = sum(int(part["counted"]) for part in parts)
    return Evaluation(sum(float(part["ce_sum"]) for part in parts) / max(counted, 1), counted)


def line_of(
    values: Mapping[str, Any],
    *,
    step: int,
    tokens: int,
    lr: float,
    step_time_s: float,
    assignment: str,
    evaluation: Evaluation | None,
    bad_leaves: Sequence[str] | None = None,
) -> Line:
    """Return a step's line; `values` are what the step returned.

    Units: `tokens` is the total so far, `tokens_per_s` this step's own.
    """
    floats = {name: float(values[name]) for name in FROM_STEP}
    line: Line = {
        "step": step,
        "tokens": tokens,
        **floats,
        "lr": lr,
        "skipped": int(values["skipped"]),
        "drop_rate": float(values["drop_rate"]),
        "max_load": float(values["max_load"]),
        "tokens_per_s": int(values["tokens"]) / step_time_s,
        "step_time_s": step_time_s,
    }
    if assignment != "learned":
        line["assignment"] = assignment
    if evaluation is not None:
        line["eval_loss"] = evaluation.loss
        line["eval_perplexity"] = evaluation.perplexity
    if bad_leaves is not None:
        line["bad_leaves"] = list(bad_leaves)
    if "expert_counts" in values:
        line["expert_counts"] = np.asarray(values["expert_counts"]).tolist()
    return line


FROM_STEP = ("loss", "z_loss", "balance_loss", "router_z_loss", "grad_norm")


class MetricsFile:
    """Appends lines, each flushed, so that a killed run has all steps that it showed.

    A value that is not finite is written as NaN or Infinity, as Python's json reads it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "MetricsFile":
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: Line) -> None:
        """Append a line.

        Raises: UserError if the disk refuses it.
        """
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written ({error.strerror}); each step's line goes there; "
                "mend that, and the same command goes on from the last checkpoint"
            ) from None

    def keep(self) -> None:
        """Put all lines on the disk, so that a checkpoint that follows never lacks one."""
        if self._path.is_file():
            os.fsync(self._file.fileno())


def read(path: Path) -> list[Line]:
    """Return all lines of a metrics.jsonl.

    Raises: UserError if a line is no JSON.
    """
    lines: list[Line] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number} is no JSON ({error.msg}); remove the line if a killed run "
                "left it half written"
            ) from None
    return lines


class Cut(NamedTuple):
    """What was taken out of a metrics.jsonl: lines of later steps, and lines that are no JSON."""

    later: int
    damaged: int


def cut_back(path: Path, step: int) -> Cut:
    """Leave the lines of the first `step` steps, each step once, and say what was taken out.

    A killed run may leave its last line half written. The file is replaced as a whole, or stays.
    """
    if not path.exists():
        return Cut(0, 0)
    content = path.read_bytes()
    lines = [(text, _step_of(text)) for text in content.split(b"\n") if text]
    kept = {found: text for text, found in lines if found is not None and found <= step}
    damaged = sum(found is None for _, found in lines)
    new = b"".join(kept[found] + b"\n" for found in sorted(kept))
    if new != content:
        replace(path, new)
    return Cut(len(lines) - len(kept) - damaged, damaged)


def _step_of(text: bytes) -> int | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if isinstance(step, int) else None
