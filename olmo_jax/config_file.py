"""From a YAML file and `a.b=c` overrides to a checked Config, and back to YAML."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from olmo_jax.config import document
from olmo_jax.config.messages import faults, record_in, show, together, unknown_key
from olmo_jax.config.records import Config, Record
from olmo_jax.errors import UserError
from olmo_jax.rules.validation import validate


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in the file at `path`; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (at byte {error.start}); give the path of a YAML file"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    tree = document.parse(text, str(path))
    if tree is not None and not isinstance(tree, dict):
        raise UserError(
            f"{path} holds {show(tree)[:30]}, not the mapping that a config is; write lines of "
            "`key: value`"
        )
    return tree or {}


def _split(override: str) -> tuple[list[str], Any]:
    """Return the dotted key's parts and the value of an override, typed as YAML types it."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        problem = "has an empty key" if equals else "has no '='"
        raise UserError(f"the override {override!r} {problem}; write it as section.key=value")
    if not text.strip():
        raise UserError(
            f"the override {override!r} has no value; write {'.'.join(parts)}=null to unset the key"
        )
    return parts, document.parse(text, f"the value in the override {override!r}")


def _check_path(parts: Sequence[str], value: object) -> None:
    """Refuse an override whose key leads nowhere, before it hides what the file says."""
    given = f"{'.'.join(parts)}={show(value)}"
    record: type[Record] | None = Config
    for depth, part in enumerate(parts):
        if record is None:
            above = ".".join(parts[:depth])
            raise UserError(
                f"{given} goes below {above}, which is a value and has no "
                f"keys; write {above}=... as a whole"
            )
        if part not in record.model_fields:
            raise UserError(unknown_key(given, parts[: depth + 1], record))
        annotation = record.model_fields[part].annotation
        record = record_in(annotation) if isinstance(annotation, type) else None


def _put(tree: Mapping[str, Any], parts: Sequence[str], value: object) -> dict[str, Any]:
    """Return `tree` with `value` at the dotted key; a mapping there replaces the section."""
    head, *rest = parts
    if not rest:
        return {**tree, head: value}
    below = tree.get(head)
    return {**tree, head: _put(below if isinstance(below, dict) else {}, rest, value)}


def merged(tree: Mapping[str, Any], overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return a config's mapping with the overrides put in, values as they are written."""
    for override in overrides:
        parts, value = _split(override)
        _check_path(parts, value)
        tree = _put(tree, parts, value)
    return tree


def typed(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config with keys, types and ranges checked, and the rules between keys not yet.

    Raises: UserError with every unknown key and every wrong value.
    """
    tree = merged({} if path is None else _read(Path(path)), overrides)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(together(faults(error))) from None


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config in the YAML file `path` (None: all defaults) with the overrides applied.

    It has passed `validate`. A mapping as an override replaces the whole section.

    Raises: UserError with every fault found.
    """
    return validate(typed(path, overrides))


def to_yaml(config: Config) -> str:
    """Return the config, defaults included, as YAML that `load` reads back to the same config."""
    return document.dump(config.model_dump(mode="json"))
