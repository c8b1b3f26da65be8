"""Tokens of a source as one stream: documents held out by hash, windows of fixed length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Integer, Shaped

from olmo_jax.config.records import SourceConfig
from olmo_jax.data.shards import (
    REWRITE,
    check_blocks,
    check_ids,
    file_digest,
    map_array,
    open_documents,
    open_tokens,
)
from olmo_jax.data.token_manifest import (
    Manifest,
    Shard,
    digest,
    read_manifest,
    shard_fingerprint,
)
from olmo_jax.errors import UserError
from olmo_jax.file_names import TOKENIZER


class Row(NamedTuple):
    """Consecutive tokens of a stream; a token that is not `wanted` is no target of the loss."""

    tokens: Int[np.ndarray, " L"]
    wanted: Bool[np.ndarray, " L"]


@dataclass(frozen=True)
class Stream:
    """Stretches of mapped shards, end to end: stretch i ends before stream position `ends[i]`."""

    folder: Path
    names: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...] | None
    shard: Int[np.ndarray, " stretches"]
    start: Int[np.ndarray, " stretches"]
    ends: Int[np.ndarray, " stretches"]
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0


@dataclass(frozen=True)
class Windows:
    """A stream cut into rows of `length` tokens, for Grain; what is left at its end is dropped."""

    stream: Stream
    length: int

    def __len__(self) -> int:
        return self.stream.num_tokens // self.length

    def __getitem__(self, index: int) -> Row:
        return read(self.stream, index * self.length, self.length)


@dataclass(frozen=True)
class Source:
    """A folder of tokens, opened and checked, in two streams that share no document.

    `fingerprint` names all of its tokens, `parts` their pieces: see `parts_of`.
    """

    manifest: Manifest
    fingerprint: str
    parts: frozenset[str]
    tokenizer_path: Path | None
    train: Stream
    held_out: Stream


def read(stream: Stream, begin: int, count: int) -> Row:
    """Copy tokens `[begin, begin + count)` of a stream, as far as it goes."""
    tokens, wanted = [], []
    stop = min(begin + count, stream.num_tokens)
    stretch = int(np.searchsorted(stream.ends, begin, side="right"))
    while begin < stop:
        upto, shard = min(int(stream.ends[stretch]), stop), int(stream.shard[stretch])
        first = int(stream.start[stretch] + begin - before(stream, stretch))
        cut = slice(first, first + upto - begin)
        check_ids(stream.tokens[shard][cut], stream.folder / stream.names[shard], stream.vocab_size)
        tokens.append(stream.tokens[shard][cut])
        if stream.masks is not None:
            wanted.append(stream.masks[shard][cut])
        begin, stretch = upto, stretch + 1
    joined = np.concatenate([np.zeros(0, np.int32), *tokens]).astype(np.int32)
    if stream.masks is None:
        return Row(joined, np.ones(len(joined), bool))
    return Row(joined, np.concatenate([np.zeros(0, bool), *wanted]).astype(bool))


def before(stream: Stream, stretch: int) -> int:
    return int(stream.ends[stretch - 1]) if stretch else 0


def open_source(source: SourceConfig, *, eval_fraction: float, vocab_size: int) -> Source:
    """Open a folder that `olmo-jax data tokenize` wrote, or one token file in it, and check it.

    Raises: UserError for a missing, truncated or foreign file, a vocabulary beyond the model's, a
    label mask of another length.
    """
    path = Path(source.path)
    folder = folder_of(path)
    manifest = read_manifest(folder)
    check_vocabulary(folder, manifest, vocab_size)
    shards = pick_shards(folder, manifest, path)
    tokens = tuple(open_tokens(folder, shard, manifest) for shard in shards)
    check_blocks(folder, shards, tokens, vocab_size)
    masks = open_masks(source, [shard.num_tokens for shard in shards])
    train, held_out = split(folder, shards, eval_fraction)
    names = tuple(shard.tokens for shard in shards)
    return Source(
        manifest=manifest,
        fingerprint=digest(*(shard_fingerprint(shard) for shard in shards)),
        parts=parts_of(shards),
        tokenizer_path=find_tokenizer(folder, manifest),
        train=Stream(folder, names, tokens, masks, *train, vocab_size),
        held_out=Stream(folder, names, tokens, masks, *held_out, vocab_size),
    )


def folder_of(path: Path) -> Path:
    """Return the folder of a source, which is named itself or by one token file in it."""
    return path.parent if path.suffix == ".npy" else path


def parts_of(shards: Sequence[Shard]) -> frozenset[str]:
    """Name each whole shard and each block of 16 MiB: sources that share one hold the same text.

    A shard's last block is left out, for it may be a few tokens that any text ends in.
    """
    blocks = (block for shard in shards for block in shard.token_blocks[:-1])
    return frozenset([*map(shard_fingerprint, shards), *blocks])


def check_vocabulary(folder: Path, manifest: Manifest, vocab_size: int) -> None:
    if manifest.vocab_size > vocab_size:
        raise UserError(
            f"{folder} was tokenized with a vocabulary of {manifest.vocab_size} and "
            f"model.vocab_size={vocab_size}; every token id must be below model.vocab_size; "
            f"write model.vocab_size={manifest.vocab_size} or more, or tokenize with a smaller one"
        )


def find_tokenizer(folder: Path, manifest: Manifest) -> Path | None:
    """Return a folder's tokenizer, if it is there; training does without."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    if file_digest(path) != manifest.tokenizer_sha256:
        raise UserError(f"{path} is not the tokenizer that its manifest names; {REWRITE}")
    return path


def pick_shards(folder: Path, manifest: Manifest, path: Path) -> list[Shard]:
    """Return all shards of a folder, or the one that is named."""
    if path == folder:
        return list(manifest.files)
    chosen = [shard for shard in manifest.files if shard.tokens == path.name]
    if not chosen:
        known = ", ".join(shard.tokens for shard in manifest.files[:8])
        raise UserError(
            f"{path} is no token file of its folder's manifest; name the folder, or one of {known}"
        )
    return chosen


def open_masks(source: SourceConfig, lengths: list[int]) -> tuple[np.ndarray, ...] | None:
    """Map a source's label mask, cut along its shards; false marks a token not to be learned."""
    if source.label_mask is None:
        return None
    path = Path(source.label_mask)
    try:
        mask = map_array(path)
    except FileNotFoundError:
        raise UserError(
            f"label_mask {path}: there is no such file; check the path, or leave label_mask out"
        ) from None
    except ValueError as error:
        raise UserError(
            f"label_mask {path} is not a whole .npy file ({error}); write it with numpy.save"
        ) from None
    check_mask(mask, path, source.path, sum(lengths))
    return tuple(np.split(mask, np.cumsum(lengths)[:-1]))


def check_mask(mask: np.ndarray, path: Path, source: str, num_tokens: int) -> None:
    if mask.ndim != 1 or mask.dtype not in (np.bool_, np.uint8):
        raise UserError(
            f"label_mask {path} holds {mask.dtype}{list(mask.shape)}; a label mask is one row of "
            "bool or uint8; write numpy.save(path, mask.astype(bool))"
        )
    if len(mask) != num_tokens:
        raise UserError(
            f"label_mask {path} has {len(mask)} entries and {source} has {num_tokens} tokens; "
            "write one entry for each token"
        )


Stretches = tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"], Int[np.ndarray, " _"]]
"""Shard, first token in it, and end in the stream, of each stretch."""


def split(folder: Path, shards: list[Shard], eval_fraction: float) -> tuple[Stretches, Stretches]:
    """Divide documents between training and evaluation by a hash of (shard, document number).

    The division knows nothing of seed, mesh or other sources, so it stays when those change.
    """
    train, held_out = [], []
    for number, shard in enumerate(shards):
        if eval_fraction == 0:
            train.append(stretches(number, np.array([0, shard.num_tokens]), np.array([True])))
            continue
        borders = open_documents(folder, shard)
        chosen = held(shard_fingerprint(shard), shard.num_documents, eval_fraction)
        train.append(stretches(number, borders, ~chosen))
        held_out.append(stretches(number, borders, chosen))
    return chain_up(train), chain_up(held_out)


def held(fingerprint: str, num_documents: int, fraction: float) -> Bool[np.ndarray, " documents"]:
    """Draw documents: one 64-bit hash each, below `fraction` of its range.

    Source: SplitMix64 (Steele, Lea, Flood 2014), its output function over a counter.
    """
    state = np.arange(num_documents, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(int(fingerprint[:16], 16))
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) < np.uint64(int(fraction * 2**64))


def stretches(
    number: int,
    borders: Integer[np.ndarray, " borders"],
    chosen: Bool[np.ndarray, " documents"],
) -> Shaped[np.ndarray, "stretches 3"]:
    """Join chosen documents that touch; one line of (shard, first token, number of tokens) each."""
    edges = np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8))
    first, last = borders[np.flatnonzero(edges == 1)], borders[np.flatnonzero(edges == -1)]
    return np.stack([np.full(len(first), number), first, last - first], axis=1).astype(np.int64)


def chain_up(parts: list[np.ndarray]) -> Stretches:
    table = np.concatenate([np.zeros((0, 3), np.int64), *parts])
    return table[:, 0], table[:, 1], np.cumsum(table[:, 2])
