"""What a checkpoint says of itself: where its run stood, and every leaf with its checksum."""

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from etils import epath

from olmo_jax.checkpoint import folders
from olmo_jax.checkpoint.leaves import Key
from olmo_jax.config.records import Config
from olmo_jax.errors import UserError

FORMAT = 1


class Position(NamedTuple):
    """Where a run stands: `step` steps are done, `sequences` consumed, `tokens` not padding."""

    step: int
    sequences: int
    tokens: int


class Leaf(NamedTuple):
    """One logical array of a checkpoint; `checksum` is the text of its `Checksum`."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclass(frozen=True)
class Saved:
    """All of a checkpoint but its arrays.

    `facts` identify data and tokenizer, and name the horizon that the run began with.
    """

    position: Position
    seed: int
    config: dict[str, Any]
    facts: dict[str, str]
    leaves: dict[Key, Leaf]
    written: str
    folder: epath.Path


def describe(
    leaves: Mapping[Key, Any],
    checksums: Mapping[Key, str],
    position: Position,
    config: Config,
    facts: Mapping[str, str],
) -> dict[str, Any]:
    """Return the manifest as JSON has it, with a digest of the rest in it."""
    content = {
        "format": FORMAT,
        "position": position._asdict(),
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "facts": dict(facts),
        "leaves": [
            {
                "role": key.role,
                "name": key.name,
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "checksum": checksums[key],
            }
            for key, leaf in leaves.items()
        ],
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return {**content, "digest": _digest(content)}


def _digest(content: Mapping[str, Any]) -> str:
    # Sorted keys: the text, and so the digest, is the same after a round trip through JSON.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(folder: epath.Path) -> Saved:
    """Return what a whole checkpoint says of itself.

    Raises: UserError if the manifest is not as it was written, or of another format.
    """
    path = folders.manifest_in(folder)
    try:
        content = json.loads(path.read_text())
        digest = content.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"it cannot be read: {error}") from None
    if digest != _digest(content):
        raise _damaged(folder, "its digest differs from its content")
    if content["format"] != FORMAT:
        raise UserError(
            f"{path} is of format {content['format']}; this version reads format {FORMAT}; use the "
            "version of olmo_jax that wrote it"
        )
    return Saved(
        position=Position(**content["position"]),
        seed=content["seed"],
        config=content["config"],
        facts=content["facts"],
        leaves=leaves_of(content),
        written=content["written"],
        folder=folder,
    )


def leaves_of(content: Mapping[str, Any]) -> dict[Key, Leaf]:
    """Return the leaves that a manifest describes."""
    return {
        Key(leaf["role"], leaf["name"]): Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
        for leaf in content["leaves"]
    }


def _damaged(folder: epath.Path, why: str) -> UserError:
    return UserError(
        f"{folders.manifest_in(folder)} is damaged ({why}); a checkpoint is read only as it was "
        f"written; {folders.way_on(folder)}"
    )
