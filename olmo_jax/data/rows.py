"""From rows of tokens to the batch that the step takes: labels, documents, positions, padding."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

from olmo_jax.arch.labels import IGNORED
from olmo_jax.data.batch import Batch
from olmo_jax.data.sources import Row


def assemble(
    rows: Sequence[Row],
    numbers: Sequence[int],
    *,
    length: int,
    eos_id: int,
    document_attention: bool,
) -> Batch:
    """Stack rows, padded at their end to `length`; `numbers` are places in the global batch."""
    tokens = np.zeros((len(rows), length), np.int32)
    wanted, padding_mask = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        wanted[i, : len(row.tokens)] = row.wanted
        padding_mask[i, : len(row.tokens)] = True
    starts = document_starts(tokens, eos_id) if document_attention else one_document(tokens)
    return Batch(
        tokens=tokens,
        labels=shift(tokens, wanted & padding_mask),
        segment_ids=np.where(padding_mask, np.cumsum(starts, axis=1, dtype=np.int32), np.int32(0)),
        positions=np.where(padding_mask, count_from(starts), np.int32(0)),
        padding_mask=padding_mask,
        sequence=np.array(numbers, np.int32),
    )


def shift(
    tokens: Int32[np.ndarray, "B L"], wanted: Bool[np.ndarray, "B L"]
) -> Int32[np.ndarray, "B L"]:
    """Label each position with the next token of its row; the last one, and unwanted targets, -100.

    A mask marks targets, not the positions that predict them: it is shifted with the tokens.
    Source: olmo_core 3.0.0, data/utils.py (get_labels).
    """
    labels = np.full(tokens.shape, IGNORED, np.int32)
    labels[:, :-1] = np.where(wanted[:, 1:], tokens[:, 1:], IGNORED)
    return labels


def document_starts(tokens: Int32[np.ndarray, "B L"], eos_id: int) -> Bool[np.ndarray, "B L"]:
    """Mark first tokens of documents: a row's first, and each after an EOS (which ends its own)."""
    starts = one_document(tokens)
    starts[:, 1:] = tokens[:, :-1] == eos_id
    return starts


def one_document(tokens: Int32[np.ndarray, "B L"]) -> Bool[np.ndarray, "B L"]:
    starts = np.zeros(tokens.shape, bool)
    starts[:, :1] = True
    return starts


def count_from(starts: Bool[np.ndarray, "B L"]) -> Int32[np.ndarray, "B L"]:
    """Number the positions of each document from 0."""
    place = np.broadcast_to(np.arange(starts.shape[1], dtype=np.int32), starts.shape)
    return place - np.maximum.accumulate(np.where(starts, place, np.int32(0)), axis=1)
