"""Check what transformers makes of exported rotary rules, for layers with windows or without.

python tools/check_rotary_export.py --python OTHER/bin/python

Tiny random models are exported, loaded by `Olmo3MoeForCausalLM.from_pretrained` and run; a cell is
the relative error of their FP32 logits against olmo_jax's one-device model. What export refuses is
written all the same, to show what would come of it. The exit code is 1 if a model that export
accepts does not load, or differs by 1e-5 or more.

OTHER is a virtual environment of its own, as olmo_jax needs none of this:
    pip install 'torch>=2.10,<2.14' transformers==5.4.0 cached-path 'filelock<4' requests \
        dataclass-extensions importlib_resources bettermap
    pip install --no-deps ai2-olmo-core==3.0.0
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_jax.config.records import ModelConfig, RopeConfig, WindowConfig
from olmo_jax.errors import UserError
from olmo_jax.runtime.environment import prepare

TOLERANCE = 1e-5
LENGTH, WINDOW, ORIGINAL_LENGTH = 160, 8, 64
MIN_WIDTH = 160
"""Columns of the output where it goes to a file or a narrow terminal."""

WINDOWS: dict[str, tuple[int, ...]] = {
    "no windows": (),
    "all sliding": (WINDOW,),
    "sliding and full": (WINDOW, -1),
}

_BASE = {"theta": 1e4, "factor": 4.0, "original_length": ORIGINAL_LENGTH, "scaled_theta": 1e6}
_SCALINGS = ("none", "abf", "pi", "stepwise", "yarn")
RULES: dict[str, dict[str, Any]] = {
    f"{scaling}, {layers}": {**_BASE, "scaling": scaling, "scaled_layers": layers}
    for scaling in _SCALINGS
    for layers in ("full", "all")
}
for _name, _length in {"ramp to the last pair": 10_000, "ramp past the head": 30_000}.items():
    RULES[f"yarn, all, {_name}"] = {**RULES["yarn, all"], "original_length": _length}
RULES["none, on_full_attention=false"] = {**_BASE, "on_full_attention": False}

LOADER = """
import sys
from pathlib import Path
import numpy as np
try:
    import torch
    from olmo_core.nn.moe.v2.hf.modeling_olmo3moe import Olmo3MoeForCausalLM
except ImportError as error:
    sys.exit(f"{error}")
tokens = torch.from_numpy(np.load(sys.argv[1]))
for folder in map(Path, sys.argv[2:]):
    try:
        model = Olmo3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            np.save(folder / "logits.npy", model(tokens, use_cache=False).logits.numpy())
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
"""
"""Run by the other interpreter: logits.npy or error.txt into each folder. Nothing of olmo_jax."""


class Case(NamedTuple):
    rule: str
    windows: str
    model: ModelConfig
    refused: bool
    folder: Path
    logits: np.ndarray


class Result(NamedTuple):
    text: str
    wrong: bool


def model_of(rule: str, windows: str) -> ModelConfig:
    return ModelConfig(
        num_layers=4,
        num_dense_layers=1,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_experts=4,
        top_k=2,
        expert_hidden=16,
        shared_hidden=16,
        dense_hidden=32,
        vocab_size=64,
        dtype="float32",
        rope=RopeConfig(**RULES[rule]),
        windows=WindowConfig(
            pattern=WINDOWS[windows], force_full_first=False, force_full_last=False
        ),
    )


def _random(model: ModelConfig) -> dict[str, np.ndarray]:
    from olmo_jax.arch.parameters import parameters

    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in parameters(model).items()
    }


def _export(folder: Path, model: ModelConfig, params: dict[str, np.ndarray]) -> bool:
    """Write the folder, and say whether `save` refused to."""
    from olmo_jax.interop import files
    from olmo_jax.interop.huggingface import save
    from olmo_jax.interop.olmo3moe_config import config_fields
    from olmo_jax.interop.weights import separate

    try:
        save(folder, model, params)
    except UserError:
        tensors = {k: np.ascontiguousarray(v) for k, v in separate(model, params).items()}
        files.write(folder, config_fields(model), tensors)
        return True
    return False


def export(root: Path, tokens: np.ndarray) -> Iterator[Case]:
    """Write a folder for each rule and windows, and run the model here."""
    # Not at the top: jax is imported after `prepare` has set what it reads.
    from olmo_jax.model import apply

    for rule in RULES:
        for windows in WINDOWS:
            model = model_of(rule, windows)
            params = _random(model)
            folder = root / f"{rule}, {windows}"
            refused = _export(folder, model, params)
            # The shapes of `apply` name jax's arrays, which numpy's may stand for.
            arguments: Any = params, tokens
            logits = np.asarray(apply(model, *arguments))
            yield Case(rule, windows, model, refused, folder, logits)


def load(python: str, tokens: Path, folders: Sequence[Path]) -> None:
    """Let the other interpreter load and run every folder.

    Raises: UserError if it lacks what it needs.
    """
    command = [python, "-c", LOADER, str(tokens), *map(str, folders)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--python={python} does not run: {error}; name an interpreter") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(
            f"--python={python} cannot load Olmo3MoeForCausalLM: {last}; install torch, "
            "transformers and ai2-olmo-core there, as the top of this program says"
        )


def compare(case: Case) -> Result:
    """Return the cell of a case."""
    file = case.folder / "logits.npy"
    if file.exists():
        theirs = np.load(file)
        error = float(np.linalg.norm(theirs - case.logits) / np.linalg.norm(case.logits))
        agrees, text = error < TOLERANCE, f"{error:.0e}"
    else:
        agrees, text = False, (case.folder / "error.txt").read_text().splitlines()[0]
    return Result(f"refused; {text}" if case.refused else text, not (agrees or case.refused))


def measure(python: str) -> tuple[Table, bool]:
    """Return the table, and whether an accepted model went wrong."""
    table = Table(title="relative error of the logits", title_justify="left")
    for column in ("scaling, scaled_layers", *WINDOWS):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as root:
        tokens = np.random.default_rng(1).integers(64, size=(2, LENGTH))
        file = Path(root) / "tokens.npy"
        np.save(file, tokens)
        load(python, file, [])  # whether it can, before a minute's work
        cases = list(export(Path(root), tokens))
        load(python, file, [case.folder for case in cases])
        results = {(case.rule, case.windows): compare(case) for case in cases}
    for rule in RULES:
        table.add_row(rule, *(results[rule, windows].text for windows in WINDOWS))
    return table, any(result.wrong for result in results.values())


def parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--python",
        default=sys.executable,
        help="an interpreter with torch, transformers and ai2-olmo-core",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    options = parser().parse_args(arguments)
    prepare(1)
    try:
        table, wrong = measure(options.python)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
