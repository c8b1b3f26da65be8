"""Folders of tokens with known ids, written straight from lists."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from olmo_jax.config.records import DataConfig, SourceConfig
from olmo_jax.data.corpus import Corpus, open_corpus
from olmo_jax.data.token_manifest import Manifest, folder_fingerprint, write_manifest
from olmo_jax.data.tokenize import write_shards

VOCAB_SIZE = 5000
TEXTS = [f"Chapter {i}: " + "the quick brown fox jumps. " * (1 + i % 7) + "\n" for i in range(40)]


def write_folder(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    vocab_size: int = VOCAB_SIZE,
    dtype: str = "uint16",
) -> Path:
    """Write documents of known token ids, without their EOS 0, as `tokenize` would."""
    folder.mkdir(parents=True)
    kind = np.dtype(dtype)
    arrays = iter([np.array([*document, 0], kind) for document in documents])
    shards = write_shards(folder, arrays, kind)
    facts = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": 0,
        "tokenizer_sha256": hashlib.sha256(b"none").hexdigest(),
    }
    manifest = Manifest(
        **facts,
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_skipped=0,
        files=tuple(shards),
        fingerprint=folder_fingerprint(shards, **facts),
    )
    write_manifest(folder, manifest)
    return folder


def counting(folder: Path, num_windows: int, length: int, *, first: int = 1) -> Path:
    """Write one document of consecutive ids; window w starts with w * length + first."""
    return write_folder(folder, [list(range(first, first + num_windows * length))])


def open_folders(
    *folders: Path,
    weights: Sequence[float] | None = None,
    length: int = 4,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    label_mask: str | None = None,
    **data: object,
) -> Corpus:
    sources = tuple(
        SourceConfig(path=str(folder), weight=weight, label_mask=label_mask)
        for folder, weight in zip(folders, weights or [1.0] * len(folders), strict=True)
    )
    config = DataConfig.model_validate({"sources": sources, **data})
    return open_corpus(config, sequence_length=length, seed=seed, vocab_size=vocab_size)
