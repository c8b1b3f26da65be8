"""What a folder of tokens says about itself, so that a truncated or foreign file is noticed."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from olmo_jax.config.records import Count, Natural, Record
from olmo_jax.errors import UserError

MANIFEST = "manifest.json"
SKIPPED = "skipped.txt"


class Shard(Record, frozen=True):
    """One file of tokens, cut at documents, and the file of its document borders."""

    tokens: str
    documents: str
    num_tokens: Count
    num_documents: Count
    token_blocks: tuple[str, ...]
    documents_sha256: str


class Manifest(Record, frozen=True):
    """All shards of a folder; `fingerprint` names the content, not the place or the time."""

    format: Literal["olmo_jax tokens 1"] = "olmo_jax tokens 1"
    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos_id: Natural
    num_tokens: Count
    num_documents: Count
    num_skipped: Natural
    tokenizer_sha256: str
    files: tuple[Shard, ...]
    fingerprint: str


def digest(*parts: str | bytes) -> str:
    """Return the sha256 of the parts, each closed by a zero byte."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()


def shard_fingerprint(shard: Shard) -> str:
    """Name the tokens of a shard, whatever the file is called."""
    return digest(*shard.token_blocks)


def folder_fingerprint(
    shards: Iterable[Shard], *, dtype: str, vocab_size: int, eos_id: int, tokenizer_sha256: str
) -> str:
    """Name a folder's tokens and how to read them."""
    facts = (dtype, str(vocab_size), str(eos_id), tokenizer_sha256)
    return digest(*facts, *(part for s in shards for part in (*s.token_blocks, s.documents_sha256)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises: UserError if the folder is missing, is not one of ours, or its manifest was changed.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} is a file and not a folder of tokens; name a folder that "
            "`olmo-jax data tokenize` wrote, or a .npy file in one"
        )
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; write it with `olmo-jax data tokenize --input "
            f"TEXT --output {folder}`"
        )
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} has no {MANIFEST}, so it is not a folder that `olmo-jax data tokenize` "
            "wrote; tokenize your text into a new folder and name that one"
        )
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(key) for key in first["loc"]) or "the file"
        raise UserError(
            f"{path} is not a manifest of tokens: {place}: {first['msg']}; "
            "write the folder again with `olmo-jax data tokenize`"
        ) from None
    if foreign := [name for name in file_names(manifest) if not is_name(name)]:
        raise UserError(
            f"{path} names the file {foreign[0]!r}, which is no file of its folder; a manifest has "
            "names only, and nothing outside is read; write the folder again with "
            "`olmo-jax data tokenize`"
        )
    if manifest.fingerprint != expected_fingerprint(manifest):
        raise UserError(
            f"{path} does not agree with its own fingerprint {manifest.fingerprint[:12]}, so it "
            "was changed by hand; write the folder again with `olmo-jax data tokenize`"
        )
    for name in ("num_tokens", "num_documents"):
        total = sum(getattr(shard, name) for shard in manifest.files)
        if total != (stated := getattr(manifest, name)):
            raise UserError(
                f"{path} has {name}={stated}, and its files have {total} together, so it was "
                "changed by hand; write the folder again with `olmo-jax data tokenize`"
            )
    return manifest


def file_names(manifest: Manifest) -> list[str]:
    """Return the files that a manifest names."""
    return [name for shard in manifest.files for name in (shard.tokens, shard.documents)]


def is_name(text: str) -> bool:
    """Say whether a text is the name of a file in a folder, and no path to another place."""
    return text not in ("", ".", "..") and not {"/", "\\", "\0"} & set(text)


def expected_fingerprint(manifest: Manifest) -> str:
    return folder_fingerprint(
        manifest.files,
        dtype=manifest.dtype,
        vocab_size=manifest.vocab_size,
        eos_id=manifest.eos_id,
        tokenizer_sha256=manifest.tokenizer_sha256,
    )
