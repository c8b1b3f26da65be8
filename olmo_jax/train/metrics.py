"""The lines of metrics.jsonl: one a step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from olmo_jax.errors import UserError

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
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


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
