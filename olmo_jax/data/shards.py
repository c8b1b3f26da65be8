"""Token files: flat `.npy` arrays cut at documents, written once, checked when opened."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Integer

from olmo_jax.data.token_manifest import Manifest, Shard
from olmo_jax.errors import UserError

SHARD_TOKENS = 128 << 20
BLOCK_BYTES = 16 << 20
CHECKED_BLOCKS = 16
REWRITE = "write the folder again with `olmo-jax data tokenize`"


def write_shard(
    folder: Path, number: int, documents: Iterator[np.ndarray], dtype: np.dtype
) -> Shard:
    """Write documents until the shard is full or they end; each is an array that ends in EOS."""
    tokens, borders = folder / f"tokens_{number:05d}.npy", folder / f"documents_{number:05d}.npy"
    offsets = array("q", [0])
    with tokens.open("wb") as file:
        start = write_header(file, dtype, 0)
        for document in documents:
            file.write(document.astype(dtype, copy=False).tobytes())
            offsets.append(offsets[-1] + len(document))
            if offsets[-1] >= SHARD_TOKENS:
                break
        file.seek(0)
        assert write_header(file, dtype, offsets[-1]) == start
    np.save(borders, np.array(offsets, np.int64))
    return Shard(
        tokens=tokens.name,
        documents=borders.name,
        num_tokens=offsets[-1],
        num_documents=len(offsets) - 1,
        token_blocks=tuple(block_digest(block) for block in blocks(np.load(tokens, mmap_mode="r"))),
        documents_sha256=file_digest(borders),
    )


def write_header(file: BinaryIO, dtype: np.dtype, num_tokens: int) -> int:
    """Write a `.npy` header and return its length, which NumPy keeps equal for any length."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def blocks(tokens: Integer[np.ndarray, " tokens"]) -> list[np.ndarray]:
    """Cut an array into the stretches that are checked as a whole; nothing is read yet."""
    step = BLOCK_BYTES // tokens.dtype.itemsize
    return [tokens[start : start + step] for start in range(0, len(tokens), step)]


def block_digest(block: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(block).data).hexdigest()


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def map_array(path: Path) -> np.memmap:
    """Map a `.npy` file. Raises: ValueError if it is not a whole one, OSError if out of reach."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # what NumPy raises for a broken file has no common class
        raise ValueError(str(error)) from error


def open_array(path: Path) -> np.memmap:
    """Map a `.npy` file that `tokenize` wrote.

    Raises: UserError if it is missing, not `.npy`, truncated, or has bytes past its end; OSError
    if it may not be read.
    """
    try:
        mapped = map_array(path)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; {REWRITE}") from None
    except ValueError as error:
        raise UserError(f"{path} is not a whole .npy file ({error}); {REWRITE}") from None
    size, expected = path.stat().st_size, mapped.offset + mapped.nbytes
    if size != expected:
        raise UserError(f"{path} has {size} bytes and its header says {expected}; {REWRITE}")
    return mapped


def open_tokens(folder: Path, shard: Shard, manifest: Manifest) -> Integer[np.ndarray, " tokens"]:
    """Map a shard's tokens, checked against what its manifest says of shape and type."""
    path = folder / shard.tokens
    tokens = open_array(path)
    if tokens.ndim != 1 or tokens.dtype != np.dtype(manifest.dtype):
        raise UserError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}; a token file is one row of "
            f"{manifest.dtype}, as its manifest says; {REWRITE}"
        )
    if len(tokens) != shard.num_tokens:
        raise UserError(
            f"{path} holds {len(tokens)} tokens and its manifest says {shard.num_tokens}; {REWRITE}"
        )
    if len(blocks(tokens)) != len(shard.token_blocks):
        raise UserError(
            f"{path} has {len(blocks(tokens))} blocks of {BLOCK_BYTES} bytes and its manifest "
            f"names {len(shard.token_blocks)}; {REWRITE}"
        )
    return tokens


def check_blocks(
    folder: Path, shards: Sequence[Shard], tokens: Sequence[np.ndarray], vocab_size: int
) -> None:
    """Compare 16 blocks of 16 MiB, first and last among them, with the manifest: all of small data.

    Raises: UserError for a token id that the model does not know, or for other tokens than written.
    """
    pairs = [
        (folder / shard.tokens, number, block, expected)
        for shard, mapped in zip(shards, tokens, strict=True)
        for number, (block, expected) in enumerate(
            zip(blocks(mapped), shard.token_blocks, strict=True)
        )
    ]
    for path, number, block, expected in (pairs[i] for i in evenly(len(pairs), CHECKED_BLOCKS)):
        check_ids(block, path, vocab_size)
        if block_digest(block) != expected:
            raise UserError(
                f"{path} holds other tokens than its manifest names (block {number} has another "
                f"sha256); {REWRITE}"
            )


def check_ids(tokens: Integer[np.ndarray, " tokens"], path: Path, vocab_size: int) -> None:
    """Refuse a token id beyond the model's vocabulary."""
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise UserError(
            f"{path} holds token id {largest}; model.vocab_size={vocab_size} allows 0 to "
            f"{vocab_size - 1}; write model.vocab_size={largest + 1} or more, or tokenize again"
        )


def evenly(count: int, limit: int) -> list[int]:
    """Pick up to `limit` of `count` numbers, evenly, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, limit - 1)) for i in range(limit)})


def open_documents(folder: Path, shard: Shard) -> Integer[np.ndarray, " borders"]:
    """Read where documents begin and end: document i is `[borders[i], borders[i + 1])`.

    Raises: UserError if they are not those that the manifest counts.
    """
    path = folder / shard.documents
    borders = np.asarray(open_array(path))
    if file_digest(path) != shard.documents_sha256:
        raise UserError(f"{path} holds other document borders than its manifest names; {REWRITE}")
    if borders.shape != (shard.num_documents + 1,) or borders.dtype != np.int64:
        raise UserError(
            f"{path} holds {borders.dtype}{list(borders.shape)}; {shard.num_documents} documents, "
            f"which its manifest names, have int64[{shard.num_documents + 1}] borders; {REWRITE}"
        )
    ends = (borders[0], borders[-1])
    if ends != (0, shard.num_tokens) or (np.diff(borders) < 0).any():
        raise UserError(
            f"{path} holds borders that do not ascend from 0 to {shard.num_tokens}, the tokens "
            f"that its manifest names; a document lies between two of them; {REWRITE}"
        )
    return borders
