"""What the command line says of checkpoints: listed, verified, compared, exported."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from rich.console import Console
from rich.table import Table

from olmo_jax.checkpoint import folders, identity, manifest, reading
from olmo_jax.checkpoint.checkpoints import read_saved
from olmo_jax.checkpoint.leaves import WEIGHTS, Key
from olmo_jax.checkpoint.manifest import Saved
from olmo_jax.config.messages import some
from olmo_jax.errors import UserError
from olmo_jax.file_names import TOKENIZER
from olmo_jax.formatting import decimal_bytes
from olmo_jax.interop import huggingface
from olmo_jax.interop.expressible import check_expressible

_PIPE_WIDTH = 200


def listed(run: str) -> Table:
    """Return a table of a run's whole checkpoints, or of the one whose folder is given.

    Raises: UserError if there is none.
    """
    found = folders.find(run)
    one = found == folders.path_of(run)
    chosen = [found] if one else [folders.folder_of(run, step) for step in folders.steps(run)]
    table = Table("step", "written", "size", "tokens", box=None, pad_edge=False)
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    for folder in chosen:
        table.add_row(*_row(folder))
    return table


def _row(folder: epath.Path) -> tuple[str, ...]:
    step = str(folders.step_of(folder))
    try:
        saved = manifest.read(folder)
    except UserError:
        return step, "manifest damaged", "", ""
    written = saved.written.removesuffix("+00:00").replace("T", " ")
    size = decimal_bytes(folders.num_bytes(saved.folder))
    return step, f"{written} UTC", size, f"{saved.position.tokens:,}"


def verify(run: str, step: int | None) -> str:
    """Read every leaf block by block, compare it with its checksum, and say that all agree.

    Orbax's metadata is compared too: what is damaged there cannot be restored.

    Raises: UserError that names the leaves which differ or cannot be read.
    """
    saved = read_saved(run, step)
    damaged = [key for key in saved.leaves if not _agrees(saved, key)]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(saved.leaves)} leaves of {saved.folder} are damaged: "
            f"{some(damaged, 8)}; a checkpoint is used only as it was "
            f"written; {folders.way_on(saved.folder)}"
        )
    reading.check_metadata(saved)
    size = sum(_num_bytes(saved, key) for key in saved.leaves)
    return f"{saved.folder}: {len(saved.leaves)} leaves, {decimal_bytes(size)}, all as written"


def _num_bytes(saved: Saved, key: Key) -> int:
    leaf = saved.leaves[key]
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _agrees(saved: Saved, key: Key) -> bool:
    try:
        return reading.checksum_of(saved, key) == saved.leaves[key].checksum
    except ValueError:
        return False


class Difference(NamedTuple):
    """How far a leaf is from another one; `relative` is the L2 distance over the second's norm."""

    largest: float
    relative: float


def difference(a: Saved, b: Saved, key: Key) -> Difference | str | None:
    """Compare a leaf of two checkpoints block by block; None if all bits are equal.

    Raises: UserError if one of the two cannot be read.
    """
    if key not in a.leaves or key not in b.leaves:
        return "only in B" if key not in a.leaves else "only in A"
    if a.leaves[key][:2] != b.leaves[key][:2]:
        texts = (f"{one.leaves[key].dtype}{list(one.leaves[key].shape)}" for one in (a, b))
        return " and ".join(texts)
    # One block of each at a time. Equal means equal bits: NaN equals itself, and -0 is not 0.
    # Squares of blocks add up to those of the leaf.
    pairs = list(map(_compared, _blocks(a, key), _blocks(b, key)))
    if all(pair.equal for pair in pairs):
        return None
    norm = sum(pair.norm for pair in pairs)
    squares = sum(pair.squares for pair in pairs)
    relative = float(np.sqrt(squares / norm)) if norm else float("inf")
    return Difference(float(np.max([pair.largest for pair in pairs])), relative)


class _Compared(NamedTuple):
    equal: bool
    largest: float
    squares: float
    norm: float


def _compared(x: np.ndarray, y: np.ndarray) -> _Compared:
    """Compare two blocks; a number that is not finite may meet one that is."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = y.astype(np.float64)
        apart = np.abs(x.astype(np.float64) - wide)
        return _Compared(
            x.tobytes() == y.tobytes(),
            float(apart.max(initial=0.0)),
            float(np.sum(apart**2)),
            float(np.sum(wide**2)),
        )


def _blocks(saved: Saved, key: Key) -> Iterator[np.ndarray]:
    try:
        for _, block in reading.blocks_of(saved.folder, key, saved.leaves[key]):
            yield block
    except ValueError as error:
        raise reading.damaged(saved, key, "it cannot be read") from error


def diff(first: str, second: str) -> tuple[Table | None, str]:
    """Return a table of the leaves that differ between two checkpoints (None: none), and a line.

    Raises: UserError if a leaf cannot be read.
    """
    a, b = read_saved(first), read_saved(second)
    keys = sorted({*a.leaves, *b.leaves})
    found = {key: difference(a, b, key) for key in keys}
    table = Table("leaf", "largest difference", "relative L2", box=None, pad_edge=False)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for key, one in found.items():
        if isinstance(one, Difference):
            table.add_row(str(key), f"{one.largest:.3e}", f"{one.relative:.3e}")
        elif one is not None:
            table.add_row(str(key), one)
    num_equal = sum(one is None for one in found.values())
    line = f"{num_equal} of {len(keys)} leaves are equal, bit for bit"
    return (None if num_equal == len(keys) else table), line


def export_weights(run: str, out: Path) -> str:
    """Write a run's last weights as a Hugging Face folder, and its tokenizer if it has one.

    Raises: UserError if Hugging Face's class cannot compute the model, if the run's config.yaml or
        tokenizer.json is not the checkpoint's, or if `out` is in use.
    """
    saved = read_saved(run)
    identity.refuse_edited(saved)
    model = identity.model_of(saved)
    check_expressible(model)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty; export into a new folder")
    huggingface.save(out, model, weights_on_host(saved))
    tokenizer = identity.in_run_folder(saved, TOKENIZER)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out / TOKENIZER)
    return f"{out}: the weights of step {saved.position.step} ({saved.folder})"


def weights_on_host(saved: Saved) -> Mapping[str, Any]:
    """Return all weights on one CPU device, checked against their checksums."""
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        for key, leaf in saved.leaves.items()
        if key.role in WEIGHTS
    }
    return {key.name: leaf for key, leaf in reading.read(saved, wanted).items()}


def show(table: Table) -> None:
    """Print a table; into a file or a pipe without folding it to a terminal's width."""
    console = Console()
    console.print(table, width=None if console.is_terminal else _PIPE_WIDTH)
