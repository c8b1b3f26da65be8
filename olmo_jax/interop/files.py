"""A folder as Hugging Face lays it out: config.json beside safetensors, whole or in shards."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from olmo_jax.data.token_manifest import is_name
from olmo_jax.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; write a JSON object") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, not an object; write a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of the folder's config.json."""
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} has no {CONFIG}; name a folder that holds {CONFIG} and {WEIGHTS}"
        )
    return _object(folder / CONFIG)


def _shards(folder: Path) -> dict[str, list[str]]:
    """Return the tensors to read from each shard."""
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; olmo_jax reads safetensors only, so "
            "convert other formats first"
        )
    places = _object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensor names to files; write one")
    shards: dict[str, list[str]] = {}
    for name, file in places.items():
        if not is_name(file):
            raise UserError(
                f"{folder / INDEX} places {name} in {file!r}, which is no file of its folder; an "
                "index has names only, and nothing outside is read; write the name of a file there"
            )
        shards.setdefault(file, []).append(name)
    return shards


def _read(path: Path, names: list[str] | None) -> dict[str, np.ndarray]:
    """Return the named tensors of a file, None being all of them."""
    if not path.is_file():
        raise UserError(f"{path} is named by {INDEX} but is not there; bring all shards")
    try:
        with safe_open(path, framework="np") as file:
            held = set(file.keys())
            if lacking := sorted(set(names or ()) - held):
                raise UserError(
                    f"{path} does not hold {lacking[0]}, which {INDEX} places there; "
                    "bring the shards that belong to this index"
                )
            return {name: file.get_tensor(name) for name in names or sorted(held)}
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from None


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the folder, in the dtypes they are stored in."""
    if (folder / WEIGHTS).is_file():
        return _read(folder / WEIGHTS, None)
    tensors: dict[str, np.ndarray] = {}
    for file, names in _shards(folder).items():
        tensors |= _read(folder / file, names)
    return tensors


def write(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors; the tensors must be contiguous."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / WEIGHTS
    weights.touch()
    mode = weights.stat().st_mode
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    # The writer puts a file of its own there, which nobody else may read whatever the umask is.
    weights.chmod(stat.S_IMODE(mode))
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
