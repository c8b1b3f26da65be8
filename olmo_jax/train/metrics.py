"""The lines of metrics.jsonl: one a step."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from olmo_jax.errors import UserError
from olmo_jax.train.run_folder import replace

Line = dict[str, Any]


class Evaluation(NamedTuple):
    """Mean cross entropy per loss token of the held-out batches."""

    loss: float
    loss_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf if self.loss > 0 else math.nan


def evaluation_of(parts: list[Mapping[str, Any]]) -> Evaluation:
    """Return the mean over all batches from each one's `ce_sum` and `loss_tokens`."""
    loss_tokens = sum(int(part["loss_tokens"]) for part in parts)
    return Evaluation(
        sum(float(part["ce_sum"]) for part in parts) / max(loss_tokens, 1), loss_tokens
    )


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
        try:
            # Not buffered: what a disk has refused once is not tried again by closing.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._file.close()
        except OSError as refusal:
            # What ends the run already is what the user reads.
            if error is None:
                raise self._refused(refusal) from None

    def write(self, line: Line) -> None:
        """Append a line.

        Raises: UserError if the disk refuses it.
        """
        left = memoryview(f"{json.dumps(line)}\n".encode())
        try:
            # A disk that is nearly full takes a part.
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._refused(error) from None

    def keep(self) -> None:
        """Put all lines on the disk, so that a checkpoint that follows never lacks one.

        Raises: UserError if the disk refuses it.
        """
        if not self._path.is_file():
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> UserError:
        return _refused(self._path, error)


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({error.strerror}); each step's line goes there; mend that, and "
        "the same command resumes from the last checkpoint"
    )


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


class Truncated(NamedTuple):
    """What was taken out of a metrics.jsonl: lines of later steps, and lines that are no JSON.

    `lacking` has the first and last step of each gap in what is left.
    """

    later: int
    damaged: int
    lacking: tuple[tuple[int, int], ...] = ()


def truncate(path: Path, step: int) -> Truncated:
    """Leave the lines of the first `step` steps, each step once, and say what was taken out.

    A killed run may leave its last line half written. The file is replaced as a whole, or stays.

    Raises: UserError if the disk refuses the new file.
    """
    if not path.exists():
        return Truncated(0, 0, gaps((), step))
    # A checkpoint of step 4, and a run that was killed in step 7:
    #
    #     {"step": 1} ... {"step": 4}     stay
    #     {"step": 5} {"step": 6}         go: the run takes these steps again
    #     {"step": 7, "lo                 goes: no JSON
    #
    # Of two lines of one step the last stays.
    content = path.read_bytes()
    lines = [(text, _step_of(text)) for text in content.split(b"\n") if text]
    kept = {found: text for text, found in lines if found is not None and found <= step}
    damaged = sum(found is None for _, found in lines)
    new = b"".join(kept[found] + b"\n" for found in sorted(kept))
    if new != content:
        try:
            replace(path, new)
        except OSError as error:
            raise _refused(path, error) from None
    return Truncated(len(lines) - len(kept) - damaged, damaged, gaps(kept, step))


def gaps(there: Iterable[int], last: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last number of each gap in what is there of 1 to `last`."""
    edges = [0, *sorted(there), last + 1]
    return tuple((a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1)


def _step_of(text: bytes) -> int | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if isinstance(step, int) else None
