"""The endless stream of training sequences, and the fixed batches of the held-out documents."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import cast

import grain
import numpy as np
from tokenizers import Tokenizer

from olmo_jax.config.records import Config, DataConfig
from olmo_jax.data.batch import Batch
from olmo_jax.data.mixture import Proportions
from olmo_jax.data.rows import assemble
from olmo_jax.data.shards import evenly
from olmo_jax.data.sources import Row, Source, Windows, open_source, read
from olmo_jax.data.token_manifest import digest
from olmo_jax.data.tokenize import read_tokenizer_file
from olmo_jax.errors import UserError

ENDLESS = 1 << 62


@dataclass(frozen=True)
class Corpus:
    """Opened data. `sequences[n]` is sequence n of the endless stream, by random access.

    `num_tokens` counts the training tokens of all sources; `fingerprint` names everything that
    decides which tokens a sequence has: equal fingerprints give equal sequences.
    """

    sources: tuple[Source, ...]
    sequences: grain.MapDataset
    sequence_length: int
    eos_id: int
    data: DataConfig
    num_tokens: int
    fingerprint: str
    tokenizer_path: Path | None

    def batch(self, consumed: int, rows: Sequence[int]) -> Batch:
        """Return rows of the global batch that starts after `consumed` sequences."""
        found = [cast(Row, self.sequences[consumed + row]) for row in rows]
        return self.assemble(found, rows)

    def batches(self, consumed: int, global_batch: int, rows: Sequence[int]) -> Iterator[Batch]:
        """Yield the same rows of consecutive global batches, read ahead by threads."""
        steps = grain.MapDataset.range(0, ENDLESS).map(
            lambda step: self.batch(consumed + step * global_batch, rows)
        )
        options = grain.ReadOptions(
            num_threads=self.data.threads, prefetch_buffer_size=self.data.prefetch
        )
        with closing(iter(steps.to_iter_dataset(options))) as ahead:
            yield from ahead

    def held_out(
        self, global_batch: int, num_batches: int, rows: Sequence[int] | None = None
    ) -> list[Batch]:
        """Return at most `num_batches`: windows spread evenly over all held-out documents.

        Of each batch only `rows` are read, all if none are named. Too few windows give fewer
        batches; the last one is filled up with rows of padding.
        Raises: UserError if no document is held out, or if none of them has a label.
        """
        rows = range(global_batch) if rows is None else rows
        places = [
            (source, start)
            for source in self.sources
            for start in range(0, source.held_out.num_tokens, self.sequence_length)
        ]
        if not places:
            raise UserError(
                f"data.eval_fraction={self.data.eval_fraction} holds no document out; an "
                "evaluation needs some; write data.eval_fraction=0.01"
            )
        chosen = [places[i] for i in evenly(len(places), global_batch * num_batches)]

        def row(number: int) -> Row:
            if number >= len(chosen):
                return EMPTY_ROW
            source, start = chosen[number]
            return read(source.held_out, start, self.sequence_length)

        if not any(_has_label(row(number)) for number in range(len(chosen))):
            raise UserError(
                f"data.sources: none of the {len(chosen)} rows of held-out documents has a label "
                "that counts, so their loss has no value; an evaluation needs one; write another "
                "label_mask, or a larger data.eval_fraction"
            )
        return [
            self.assemble([row(first + number) for number in rows], rows)
            for first in range(0, len(chosen), global_batch)
        ]

    def assemble(self, rows: Sequence[Row], numbers: Sequence[int]) -> Batch:
        return assemble(
            rows,
            numbers,
            length=self.sequence_length,
            eos_id=self.eos_id,
            document_attention=self.data.document_attention,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.tokenizer_path is None:
            raise UserError(
                f"{self.data.sources[0].path} has no tokenizer.json, so its tokens cannot be read "
                "as text; write the folder again with `olmo-jax data tokenize`"
            )
        return read_tokenizer_file(self.tokenizer_path)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, EOS spelled out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _has_label(row: Row) -> bool:
    """Say whether a row has a target: its first token is none."""
    return bool(row.wanted[1:].any())


EMPTY_ROW = Row(np.zeros(0, np.int32), np.zeros(0, bool))


def open_corpus(data: DataConfig, *, sequence_length: int, seed: int, vocab_size: int) -> Corpus:
    """Open and check all sources, and fix the order of their sequences.

    Each source is cut into windows of `sequence_length`, shuffled anew every epoch, and mixed by
    `weight`: a share of the sequences, and so of the tokens.
    Raises: UserError for whatever is wrong with the files, before anything is compiled.
    Differs: windows run on over file borders; olmo_core drops a remainder at the end of each file.
    """
    check_sources(data)
    sources = tuple(
        open_source(source, eval_fraction=data.eval_fraction, vocab_size=vocab_size)
        for source in data.sources
    )
    check_agreement(data, sources)
    check_distinct(data, sources)
    windows = [Windows(source.train, sequence_length) for source in sources]
    for source, cut in zip(data.sources, windows, strict=True):
        check_length(source.path, cut)
    check_held_out(data, sources)
    return Corpus(
        sources=sources,
        sequences=mix(windows, sources, [source.weight for source in data.sources], seed),
        sequence_length=sequence_length,
        eos_id=sources[0].manifest.eos_id,
        data=data,
        num_tokens=sum(source.train.num_tokens for source in sources),
        fingerprint=name_order(data, sources, sequence_length, seed),
        tokenizer_path=sources[0].tokenizer_path,
    )


def mix(
    windows: Sequence[Windows], sources: Sequence[Source], weights: Sequence[float], seed: int
) -> grain.MapDataset:
    """Shuffle each source by (seed, its content) and every epoch anew; take them in proportion."""
    shuffled = [
        grain.MapDataset.source(cut).shuffle(seed=shuffle_seed(seed, source)).repeat()
        for cut, source in zip(windows, sources, strict=True)
    ]
    return grain.MapDataset.select_from_datasets(shuffled, Proportions(weights))


def shuffle_seed(seed: int, source: Source) -> int:
    """Return 32 bits for Grain, which adds the epoch: a hash, so that near seeds share no epoch."""
    return int(digest(str(seed), source.fingerprint)[:8], 16)


def name_order(data: DataConfig, sources: Sequence[Source], sequence_length: int, seed: int) -> str:
    facts = [str(seed), str(sequence_length), repr(data.eval_fraction)]
    for config, source in zip(data.sources, sources, strict=True):
        facts += [source.fingerprint, repr(config.weight)]
    return digest(*facts)


def check_sources(data: DataConfig) -> None:
    if not data.sources:
        raise UserError(
            "data.sources is empty; training needs at least one; write data.sources: "
            "[{path: FOLDER}] with a folder that `olmo-jax data tokenize` wrote"
        )


def check_distinct(data: DataConfig, sources: Sequence[Source]) -> None:
    """Refuse sources that share tokens, wherever they lie: batches would hold each row twice.

    What was divided differently into files is not noticed.
    """
    named = zip(data.sources, sources, strict=True)
    for (first, one), (second, other) in combinations(named, 2):
        if one.parts & other.parts:
            raise UserError(
                f"data.sources names {first.path} and {second.path}, which hold the same tokens; "
                "tokens are named once, or batches hold their rows twice; name one of them, with "
                "the sum of the weights"
            )


def check_agreement(data: DataConfig, sources: Sequence[Source]) -> None:
    first = sources[0].manifest
    for config, source in zip(data.sources, sources, strict=True):
        if source.manifest.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                f"data.sources: {config.path} was tokenized with another tokenizer than "
                f"{data.sources[0].path}; all sources must share one; tokenize it again with "
                f"--tokenizer {Path(data.sources[0].path) / 'tokenizer.json'}"
            )


def check_length(path: str, windows: Windows) -> None:
    if len(windows) == 0:
        raise UserError(
            f"data.sources: {path} has {windows.stream.num_tokens} training tokens; one sequence "
            f"takes train.sequence_length={windows.length}; tokenize more text, write a smaller "
            "train.sequence_length, or a smaller data.eval_fraction"
        )


def check_held_out(data: DataConfig, sources: Sequence[Source]) -> None:
    if data.eval_fraction > 0 and not any(source.held_out.num_tokens for source in sources):
        num_documents = sum(source.manifest.num_documents for source in sources)
        raise UserError(
            f"data.eval_fraction={data.eval_fraction} holds out none of {num_documents} documents; "
            "an evaluation needs at least one; write a larger data.eval_fraction, or 0 for no "
            "evaluation"
        )


def corpus_of(config: Config) -> Corpus:
    """Open the data of a config. Raises: UserError as `open_corpus` does."""
    return open_corpus(
        config.data,
        sequence_length=config.train.sequence_length,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
    )
