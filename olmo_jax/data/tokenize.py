"""Text to tokens: train or load a byte-level BPE, encode, write one folder in one piece."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_jax.data.documents import Flaw, find_inputs, read_documents
from olmo_jax.data.fidelity import Fidelity
from olmo_jax.data.shards import write_shard
from olmo_jax.data.token_manifest import (
    SKIPPED,
    Manifest,
    Shard,
    folder_fingerprint,
    write_manifest,
)
from olmo_jax.errors import UserError
from olmo_jax.file_names import TOKENIZER

EOS = "<|endoftext|>"
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
DEFAULT_VOCAB_SIZE = 4096
SMALLEST_VOCAB_SIZE = 257  # 256 bytes and EOS
LARGEST_VOCAB_SIZE = 1 << 24  # far above any in use; the trainer reserves memory for all
SAMPLE_CHARS = 16 << 20
PIECE_CHARS = 1 << 20
BATCH_CHARS = 4 << 20
GZIP_RATIO = 4  # text, roughly

Say = Callable[[str], None]
"""Called with each thing to be known of tokens that were written."""

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, the input bytes done and the input bytes in all."""


def tokenize(
    inputs: Sequence[Path],
    output: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    suffixes: Sequence[str] = (),
    exclude: Sequence[str] = (),
    skip_bad: bool = False,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> Manifest:
    """Write the tokens of all inputs, their manifest and their tokenizer into a new folder.

    Without `tokenizer`, a byte-level BPE of `vocab_size` (4096) tokens is trained on the inputs.
    Raises: UserError for a bad input (with `skip_bad` it is left out and counted instead), for an
    output that exists, and for a tokenizer that cannot be read or loses more than a hundredth.
    """
    check_request(output, vocab_size, tokenizer)
    files, flaws = find_inputs(inputs, suffixes=suffixes, exclude=exclude)
    if flaws:
        say(passed_over(flaws))
    if tokenizer is None:
        sizes = vocab_size or DEFAULT_VOCAB_SIZE
        codec = train(files, sizes, skip_bad=skip_bad, progress=progress)
    else:
        codec = read_tokenizer_file(tokenizer)
    texts = read_all(files, flaws, skip_bad, progress, "encoding")
    # Every byte is a token of one that was trained here.
    fidelity = None if tokenizer is None else Fidelity(codec)
    with new_folder(output) as folder:
        manifest = write(folder, codec, texts, flaws, fidelity)
        if fidelity is not None and tokenizer is not None:
            fidelity.check(tokenizer)
            if lost := fidelity.summary():
                say(lost)
        return manifest


def passed_over(flaws: Sequence[Flaw]) -> str:
    """Say how many files of a folder are no text, and which the first ones are."""
    names = ", ".join(flaw.where for flaw in flaws[:3])
    more = f" and {len(flaws) - 3} more, listed in {SKIPPED}" if len(flaws) > 3 else ""
    return f"files that are no text were passed over, {len(flaws)} in all: {names}{more}"


def check_request(output: Path, vocab_size: int | None, tokenizer: Path | None) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"--output {output} exists; tokens are written into a new folder only; "
            "name another one, or remove it first"
        )
    if tokenizer is not None and vocab_size is not None:
        raise UserError(
            f"--vocab-size {vocab_size} and --tokenizer {tokenizer}: a loaded tokenizer has its "
            "own vocabulary; write one of the two"
        )
    if vocab_size is not None and vocab_size < SMALLEST_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size {vocab_size}: a byte-level vocabulary has 256 bytes and one end of "
            f"document; write {SMALLEST_VOCAB_SIZE} or more"
        )
    if vocab_size is not None and vocab_size > LARGEST_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size {vocab_size}: a vocabulary has at most {LARGEST_VOCAB_SIZE} tokens; "
            "write 32000, or another number of that order"
        )


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` that takes its name when whole and else is removed."""
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"--output {output} cannot be written ({error}); name a folder with room that may be "
            "written to"
        ) from error
    except BaseException:
        shutil.rmtree(partial)
        raise


def read_all(
    files: Sequence[Path],
    flaws: list[Flaw],
    skip_bad: bool,
    progress: Progress | None,
    stage: str,
) -> Iterator[str]:
    """Yield the documents of all files; a flaw is raised, or put on the list with `skip_bad`."""
    sizes = [path.stat().st_size for path in files]
    for path, done_bytes in zip(files, accumulate(sizes), strict=True):
        for document in read_documents(path):
            if isinstance(document, str):
                yield document
            elif skip_bad:
                flaws.append(document)
            else:
                raise UserError(f"{document}; mend it, or write --skip-bad to leave such input out")
        if progress is not None:
            progress(stage, done_bytes, sum(sizes))


def train(
    files: Sequence[Path], vocab_size: int, *, skip_bad: bool, progress: Progress | None
) -> Tokenizer:
    """Train a byte-level BPE whose id 0 ends documents, on an even sample of 16 Mi characters.

    Every byte is a token, so any text can be encoded and decoding gives the same text back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = read_all(files, [], skip_bad, progress, "reading")
    share = SAMPLE_CHARS / max(1, sum(estimate_chars(path) for path in files))
    tokenizer.train_from_iterator(sample(texts, share), trainer)
    return tokenizer


def estimate_chars(path: Path) -> int:
    return path.stat().st_size * (GZIP_RATIO if path.suffix == ".gz" else 1)


def sample(texts: Iterable[str], share: float) -> Iterator[str]:
    """Yield about `share` of all characters, evenly spread, until the sample is twice its size."""
    seen = taken = 0
    for text in texts:
        for piece, _ in pieces(text):
            seen += len(piece)
            if taken < share * seen:
                taken += len(piece)
                yield piece
        if taken > 2 * SAMPLE_CHARS:
            return


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read a tokenizer.json, without the padding and truncation it may ask for.

    Raises: UserError if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); name a tokenizer.json") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(
            f"{path} is not a tokenizer.json of Hugging Face tokenizers ({error}); put such a "
            "file there, or name another"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def find_eos(tokenizer: Tokenizer) -> int:
    """Return the id that ends documents."""
    for name in EOS_NAMES:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return number
    raise UserError(
        f"the tokenizer has none of {', '.join(EOS_NAMES)}; documents must end in a token of their "
        "own; add one of these to its added_tokens"
    )


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a long text after line ends, and say which piece is its last.

    Encoding a piece takes many times its memory; one text may be gigabytes.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        line_end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        stop = line_end if line_end > start else start + PIECE_CHARS
        yield text[start:stop], False
        start = stop
    yield text[start:], True


def batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Group pieces for the encoder, which works on all cores, in bounded memory."""
    batch: list[tuple[str, bool]] = []
    num_chars = 0
    for piece in chain.from_iterable(map(pieces, texts)):
        batch.append(piece)
        num_chars += len(piece[0])
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], dtype: np.dtype, fidelity: Fidelity | None
) -> Iterator[np.ndarray]:
    """Yield each document's tokens, EOS last; EOS spelled out in a text is plain text."""
    tokenizer.encode_special_tokens = True
    end = np.array([find_eos(tokenizer)], dtype)
    parts: list[np.ndarray] = []
    for batch in batches(texts):
        spelled = [piece for piece, _ in batch]
        encodings = encode_batch(tokenizer, spelled)
        if fidelity is not None:
            fidelity.add(spelled, encodings)
        for (_, is_last), encoding in zip(batch, encodings, strict=True):
            parts.append(np.array(encoding.ids, dtype))
            if is_last:
                yield np.concatenate([*parts, end])
                parts = []


def encode_batch(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(
            f"--tokenizer cannot encode the input ({error}); it must have a token for any text; "
            "name another, or leave --tokenizer out to train one"
        ) from error


def write(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    flaws: list[Flaw],
    fidelity: Fidelity | None,
) -> Manifest:
    """Write shards, tokenizer, the list of skipped inputs and the manifest."""
    eos_id = find_eos(tokenizer)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    shards = write_shards(folder, encode(tokenizer, texts, dtype, fidelity), dtype)
    if not shards:
        raise UserError(
            f"--input: no document in it, {len(flaws)} skipped; give at least one text that is "
            "not empty"
        )
    spelled = tokenizer.to_str(pretty=True).encode()
    (folder / TOKENIZER).write_bytes(spelled)
    (folder / SKIPPED).write_text("".join(f"{flaw}\n" for flaw in flaws), encoding="utf-8")
    facts = {
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokenizer_sha256": sha256(spelled).hexdigest(),
    }
    manifest = Manifest(
        **facts,
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_skipped=len(flaws),
        files=tuple(shards),
        fingerprint=folder_fingerprint(shards, **facts),
    )
    write_manifest(folder, manifest)
    return manifest


def write_shards(folder: Path, documents: Iterator[np.ndarray], dtype: np.dtype) -> list[Shard]:
    shards: list[Shard] = []
    for first in documents:
        shards.append(write_shard(folder, len(shards), chain([first], documents), dtype))
    return shards
