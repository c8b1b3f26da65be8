"""What a checkpoint is taken for: the model and the tokenizer that its manifest records."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from etils import epath
from pydantic import ValidationError

from olmo_jax.checkpoint.manifest import Saved
from olmo_jax.config import document
from olmo_jax.config.messages import faults, show, together
from olmo_jax.config.records import Config, ModelConfig
from olmo_jax.data.tokenize import read_tokenizer_file
from olmo_jax.errors import UserError
from olmo_jax.file_names import CHECKPOINTS, CONFIG, TOKENIZER
from olmo_jax.rules.resume_policy import Change
from olmo_jax.rules.same_model import computed_differently


def model_of(saved: Saved) -> ModelConfig:
    """Return the model that a checkpoint was saved from.

    Raises: UserError if this version has no such model.
    """
    return _model_in(saved.config, saved.folder)


def _model_in(tree: Mapping[str, Any], place: object) -> ModelConfig:
    """Return the model of a config; its other sections may be of another version."""
    try:
        return Config.model_validate({"model": tree.get("model") or {}}).model
    except ValidationError as error:
        raise UserError(f"{place} has another model's config: {together(faults(error))}") from None


def refuse_other_model(
    folder: object, before: ModelConfig, now: ModelConfig, allowed: Collection[str]
) -> list[Change]:
    """Refuse a model `now` that computes something else than `before`, the one of a folder.

    Returns what differs and is allowed by "model".

    Raises: UserError that names every key with both values.
    """
    found = computed_differently(before, now)
    if found and "model" not in allowed:
        way_out = ", or allow it with --allow-change model"
        raise UserError(together([_fault(each, "", folder, way_out) for each in found]))
    return found


def _fault(change: Change, source: str, folder: object, way_out: str) -> str:
    key, before = change.key, show(change.before)
    return (
        f"{source}{key}={show(change.now)}, and the weights of {folder} were trained with "
        f"{key}={before}; weights are used in the model that they were trained for; write "
        f"{key}={before}{way_out}"
    )


def digests_of_tokenizer(path: Path) -> set[str]:
    """Return what identifies a tokenizer.json: its bytes, and how `data tokenize` spells it."""
    if not path.exists():
        return set()
    spelled = read_tokenizer_file(path).to_str(pretty=True).encode()
    return {hashlib.sha256(text).hexdigest() for text in (path.read_bytes(), spelled)}


def tokenizer_of(saved: Saved) -> set[str]:
    """Return what identifies the tokenizer of a checkpoint; nothing if it does not say."""
    return {saved.facts["tokenizer"]} if "tokenizer" in saved.facts else set()


def refuse_other_tokenizer(
    folder: object,
    recorded: Collection[str],
    facts: Mapping[str, str],
    allowed: Collection[str] | None = None,
) -> list[str]:
    """Refuse data of another tokenizer than the weights of a folder were trained with.

    Returns what differs and is allowed by "tokenizer"; None allows nothing ever. What is not
    `recorded` is not compared.

    Raises: UserError.
    """
    now = facts.get("tokenizer")
    if now is None or not recorded or now in recorded:
        return []
    before = min(recorded)
    if allowed is None or "tokenizer" not in allowed:
        way_out = "" if allowed is None else ", or allow it with --allow-change tokenizer"
        raise UserError(
            f"data.sources was tokenized with tokenizer {now[:12]}, and the weights of {folder} "
            f"were trained with {before[:12]}; a token id must keep its meaning; tokenize with the "
            f"tokenizer.json there{way_out}"
        )
    return [f"tokenizer {before[:12]} -> {now[:12]}"]


def refuse_edited(saved: Saved) -> None:
    """Refuse a run folder whose config.yaml or tokenizer.json is not that of its checkpoint.

    What is not there is not compared.

    Raises: UserError that names every key of the model with both values, or the file.
    """
    path = in_run_folder(saved, CONFIG)
    if path is not None:
        tree = document.parse(path.read_bytes().decode(errors="backslashreplace"), str(path))
        model = _model_in(tree if isinstance(tree, dict) else {}, path)
        if found := computed_differently(model_of(saved), model):
            texts = [_fault(each, f"{path} has ", saved.folder, " there") for each in found]
            raise UserError(together(texts))
    refuse_other_tokenizer_file(saved)


def refuse_other_tokenizer_file(saved: Saved) -> None:
    """Refuse a run folder's tokenizer.json that the checkpoint was not trained with.

    Raises: UserError.
    """
    path, recorded = in_run_folder(saved, TOKENIZER), saved.facts.get("tokenizer")
    if recorded is None or path is None:
        return
    if (now := hashlib.sha256(path.read_bytes()).hexdigest()) == recorded:
        return
    raise UserError(
        f"{path} has sha256 {now[:12]}, and {saved.folder} was trained with the tokenizer "
        f"{recorded[:12]}; a token id must keep its meaning; copy the {TOKENIZER} of the run's "
        "data there"
    )


def in_run_folder(saved: Saved, name: str) -> epath.Path | None:
    """Return the file of that name in the run folder that a checkpoint lies in, if it is there."""
    if saved.folder.parent.name != CHECKPOINTS:
        return None  # a copy elsewhere: what lies two folders up is nobody's
    path = saved.folder.parent.parent / name
    return path if path.exists() else None
