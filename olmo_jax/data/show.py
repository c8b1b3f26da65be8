"""A batch as text, to look at what a model is given."""

from collections.abc import Iterator

import numpy as np

from olmo_jax.arch.labels import IGNORED
from olmo_jax.data.batch import Batch
from olmo_jax.data.corpus import Corpus
from olmo_jax.errors import UserError

DOCUMENT_CHARS = 400


def show(
    corpus: Corpus, step: int, global_batch: int, *, document_chars: int = DOCUMENT_CHARS
) -> str:
    """Return the batch of a step (from 1) as text: rows, their documents, what the loss counts.

    A document longer than `document_chars` is cut in its middle.
    """
    if step < 1:
        raise UserError(f"--step {step}: steps count from 1; write --step 1 for the first batch")
    consumed = (step - 1) * global_batch
    batch = corpus.batch(consumed, range(global_batch))
    head = (
        f"step {step}: sequences {consumed} to {consumed + global_batch - 1}, "
        f"{global_batch} rows of {corpus.sequence_length} positions, {counts(batch)}"
    )
    rows = (
        line for row in range(global_batch) for line in show_row(corpus, batch, row, document_chars)
    )
    return "\n".join([head, *rows])


def show_row(corpus: Corpus, batch: Batch, row: int, document_chars: int) -> Iterator[str]:
    cut = Batch(*(np.asarray(leaf)[row : row + 1] for leaf in batch))
    yield f"\n=== row {row}: {counts(cut)}"
    for document in range(1, 1 + num_documents(cut)):
        tokens = np.asarray(cut.tokens)[np.asarray(cut.segment_ids) == document]
        yield f"--- document {document}: {len(tokens)} tokens"
        yield shorten(corpus.decode(tokens), document_chars)


def counts(batch: Batch) -> str:
    in_loss = np.asarray(batch.padding_mask) & (np.asarray(batch.labels) != IGNORED)
    return (
        f"{int(batch.padding_mask.sum())} tokens, {int(in_loss.sum())} in the loss, "
        f"{num_documents(batch)} documents"
    )


def num_documents(batch: Batch) -> int:
    """Count documents, a document that runs over rows once in each."""
    return int(np.asarray(batch.segment_ids).max(axis=1).sum())


def shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
