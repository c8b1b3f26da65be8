import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from olmo_jax.data import shards as shards_module
from olmo_jax.data import tokenize as tokenize_module
from olmo_jax.data.token_manifest import Manifest, read_manifest
from olmo_jax.data.tokenize import tokenize
from olmo_jax.errors import UserError

HARD_TEXTS = [
    "plain words\r\n\ttabs and  spaces\n",
    "h\u00e9 \u2014 \u4e2d\u6587 \U0001f680 \0 \ufeff",
    "an end <|endoftext|> spelled out",
    " ",
]


def decoded(folder: Path) -> list[str]:
    """Read a folder back as text, document by document, without their EOS."""
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for shard in manifest.files:
        tokens, borders = np.load(folder / shard.tokens), np.load(folder / shard.documents)
        assert tokens.dtype == manifest.dtype
        for start, stop in pairwise(borders):
            assert tokens[stop - 1] == manifest.eos_id
            assert manifest.eos_id not in tokens[start : stop - 1]
            texts.append(tokenizer.decode(list(tokens[start : stop - 1])))
    return texts


def jsonl(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def run(inputs: list[Path], output: Path, **options) -> Manifest:
    return tokenize(inputs, output, **{"vocab_size": 300, **options})


def test_decoding_gives_every_text_back(tmp_path, write):
    path = write("hard.jsonl", jsonl(*({"text": text} for text in HARD_TEXTS)))
    manifest = run([path], tmp_path / "out")
    assert decoded(tmp_path / "out") == HARD_TEXTS
    assert (manifest.num_documents, manifest.num_skipped, manifest.eos_id) == (4, 0, 0)
    assert manifest.num_tokens == sum(shard.num_tokens for shard in manifest.files)


def test_text_jsonl_and_gzip_hold_the_same_documents(tmp_path, write):
    write("a/1.txt", b"one")
    write("a/2.txt.gz", gzip.compress(b"two"))
    write("a/3.jsonl", jsonl({"text": "three", "id": 7}) + b"\n" + jsonl({"text": "four"}))
    write("a/4.jsonl.gz", gzip.compress(jsonl({"text": "five"})))
    run([tmp_path / "a"], tmp_path / "out")
    assert decoded(tmp_path / "out") == ["one", "two", "three", "four", "five"]


def test_a_folder_is_walked_in_order_without_binary_hidden_and_excluded_files(tmp_path, write):
    write("a/b/2.txt", b"two")
    write("a/1.txt", b"one")
    write("a/3.bin", b"\x7fELF\0\0")
    write("a/.git/config", b"hidden")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    write("a/site-packages/4.txt", b"four")
    run([tmp_path / "a"], tmp_path / "out", exclude=["site-packages"])
    assert decoded(tmp_path / "out") == ["one", "two"]


def test_a_suffix_chooses_files_of_a_folder_and_their_gzip(tmp_path, write):
    write("a/1.py", b"one")
    write("a/2.py.gz", gzip.compress(b"two"))
    write("a/3.txt", b"three")
    run([tmp_path / "a"], tmp_path / "out", suffixes=[".py"])
    assert decoded(tmp_path / "out") == ["one", "two"]


def test_same_text_gives_the_same_fingerprint_and_other_text_another(tmp_path, write):
    texts = [b"abc abd abe " * 30, b"abc abd abf " * 30]
    path = write("a.txt", texts[0])
    first = run([path], tmp_path / "1")
    moved = run([write("moved/b.txt", texts[0])], tmp_path / "2")
    other = run([write("c.txt", texts[1])], tmp_path / "3")
    assert first.fingerprint == moved.fingerprint != other.fingerprint


def test_full_shards_are_cut_at_documents(tmp_path, write, monkeypatch):
    monkeypatch.setattr(shards_module, "SHARD_TOKENS", 20)
    texts = [f"document number {i}" for i in range(9)]
    path = write("a.jsonl", jsonl(*({"text": text} for text in texts)))
    manifest = run([path], tmp_path / "out", vocab_size=257)
    assert [shard.num_documents for shard in manifest.files] == [2, 2, 2, 2, 1]
    assert decoded(tmp_path / "out") == texts


def test_a_long_document_is_encoded_in_pieces_and_stays_one_document(tmp_path, write, monkeypatch):
    monkeypatch.setattr(tokenize_module, "PIECE_CHARS", 16)
    monkeypatch.setattr(tokenize_module, "BATCH_CHARS", 40)
    text = "a line\nanother line\n\n" * 9 + "x" * 50
    run([write("a.txt", text.encode())], tmp_path / "out")
    assert decoded(tmp_path / "out") == [text]


def test_a_loaded_tokenizer_gives_the_same_tokens_and_large_vocabularies_take_uint32(
    tmp_path, write, text_folder
):
    path = write("a.txt", b"the quick brown fox")
    saved = text_folder / "tokenizer.json"
    manifest = run([path], tmp_path / "1", vocab_size=None, tokenizer=saved)
    assert manifest.tokenizer_sha256 == read_manifest(text_folder).tokenizer_sha256
    large = json.loads(saved.read_text())
    large["model"]["vocab"]["far away"] = 70_000
    big = write("big.json", json.dumps(large).encode())
    manifest = run([path], tmp_path / "2", vocab_size=None, tokenizer=big)
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", 70_001)
    assert decoded(tmp_path / "2") == decoded(tmp_path / "1") == ["the quick brown fox"]


BAD_INPUTS = {
    "a.txt": (b"fine\nbad \xff byte", r"a\.txt, line 2: byte 9 of the file \(0xff\) is not UTF-8"),
    "empty.txt": (b"", r"empty\.txt: the file is empty"),
    "empty.jsonl": (b"", r"empty\.jsonl: the file is empty"),
    "b.jsonl": (b'{"text": "x"}\n{"text": ', r"b\.jsonl, line 2: not JSON \(.* at column \d+\)"),
    "c.jsonl": (b'{"body": "x"}\n', r'c\.jsonl, line 1: no string field "text"'),
    "d.jsonl": (b'{"text": 3}\n', r'd\.jsonl, line 1: no string field "text"'),
    "e.jsonl": (b'\n["text"]\n', r'e\.jsonl, line 2: no string field "text"'),
    "f.jsonl": (b'{"text": ""}\n', r'f\.jsonl, line 1: the field "text" is empty'),
    "g.jsonl": (b'{"text": "\\ud800"}\n', r"g\.jsonl, line 1: .*surrogate"),
    "h.jsonl": (b'{"text": "\xfe"}\n', r"h\.jsonl, line 1: byte 10 of the line \(0xfe\)"),
    "k.jsonl": (b'{"n": ' + b"9" * 5000 + b"}\n", r"k\.jsonl, line 1: .* more than 4300 digits"),
    "l.jsonl": (b'{"text": ' + b"[" * 100_000, r"l\.jsonl, line 1: .* nested too deeply"),
    "i.txt.gz": (gzip.compress(b"long text " * 99)[:-9], r"i\.txt\.gz: not a whole gzip file"),
    "j.jsonl.gz": (b"no gzip at all", r"j\.jsonl\.gz: not a whole gzip file"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_named_and_can_be_skipped_with_a_count(tmp_path, write, name):
    content, message = BAD_INPUTS[name]
    paths = [write(name, content), write("good.txt", b"good")]
    with pytest.raises(UserError, match=message + ".*--skip-bad"):
        run(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = run(paths, tmp_path / "out", skip_bad=True)
    assert manifest.num_skipped == read_manifest(tmp_path / "out").num_skipped == 1
    assert name in (tmp_path / "out" / "skipped.txt").read_text()
    assert decoded(tmp_path / "out")[-1] == "good"


OTHER_ENCODINGS = {
    "utf-16": "the file is UTF-16, and text is read as UTF-8",
    "utf-32": "the file is UTF-32, and text is read as UTF-8",
}


@pytest.mark.parametrize("encoding", OTHER_ENCODINGS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_another_encoding_is_named_in_a_folder_too(tmp_path, write, encoding, name):
    content = "Stra\u00dfe".encode(encoding)
    write(f"in/{name}", gzip.compress(content) if name.endswith(".gz") else content)
    write("in/good.txt", b"good")
    with pytest.raises(UserError, match=rf"{name}: {OTHER_ENCODINGS[encoding]} .*--skip-bad"):
        run([tmp_path / "in"], tmp_path / "out")
    assert run([tmp_path / "in"], tmp_path / "out", skip_bad=True).num_skipped == 1
    assert OTHER_ENCODINGS[encoding] in (tmp_path / "out" / "skipped.txt").read_text()
    assert decoded(tmp_path / "out") == ["good"]


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\0\0", "no mark".encode("utf-16-le")])
def test_what_is_no_text_is_passed_over_in_a_folder_with_a_word_and_else_bad(
    tmp_path, write, content
):
    path, good, said = write("in/a.png", content), write("in/good.txt", b"good"), []
    manifest = run([tmp_path / "in"], tmp_path / "1", say=said.append)
    assert manifest.num_skipped == 1
    assert (tmp_path / "1" / "skipped.txt").read_text().startswith(f"{path}: no text")
    [line] = said
    assert line == f"files that are no text were passed over, 1 in all: {path}"
    for inputs, options in (([path, good], {}), ([tmp_path / "in"], {"suffixes": [".png"]})):
        with pytest.raises(UserError, match=r"a\.png: no text: byte .* is zero.*--skip-bad"):
            run(inputs, tmp_path / "out", **options)


def test_a_zero_byte_after_the_part_that_is_looked_at_is_named(tmp_path, write):
    write("in/a.txt", b"x" * 5000 + b"\0")
    with pytest.raises(UserError, match=r"a\.txt: no text: byte 5000 of the file is zero"):
        run([tmp_path / "in"], tmp_path / "out")


GERMAN = "Der schnelle braune Fuchs springt. " * 100


def tokenizer_file(path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path


def words(path: Path, *known: str, **parts: Any) -> Path:
    """Write a tokenizer whose tokens are whole words."""
    vocab = {word: number for number, word in enumerate(("<unk>", *known))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer_file(path, tokenizer)


def pieces_of_words(path: Path) -> Path:
    vocab = {piece: number for number, piece in enumerate(["[UNK]", "Der", "##r", "braune"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer_file(path, tokenizer)


def unigrams(path: Path) -> Path:
    vocab = [("<unk>", 0.0), *((letter, -1.0) for letter in "\u2581Dersch")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer_file(path, tokenizer)


def bytes_without(letter: str, path: Path) -> Path:
    """Write a byte vocabulary that lacks one, and drops it without a word."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {letter})
    vocab = {byte: number for number, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer_file(path, tokenizer)


LOSING = {
    "another language": (lambda path: words(path, "the", "quick"), "500 of 500 tokens are unknown"),
    "few pieces": (pieces_of_words, "300 of 500 tokens are unknown"),
    "few letters": (unigrams, "tokens are unknown"),
    "a byte vocabulary without e": (lambda path: bytes_without("e", path), "most often 'e'"),
}


@pytest.mark.parametrize("name", LOSING)
def test_a_tokenizer_that_loses_the_text_is_refused_with_what_it_loses(tmp_path, write, name):
    make, message = LOSING[name]
    saved = make(tmp_path / "saved.json")
    with pytest.raises(UserError, match=f"does not hold this text: .*{message}.* at most 1%"):
        run([write("a.txt", GERMAN.encode())], tmp_path / "out", vocab_size=None, tokenizer=saved)
    assert not (tmp_path / "out").exists()


def test_a_small_loss_is_said_and_a_normalizer_s_change_is_none(tmp_path, write):
    known = sorted({*GERMAN.split(), *GERMAN.lower().split()})
    text = write("a.txt", f"{GERMAN}Hase".encode())
    for more, count in (((), 1), (("Hase", "hase"), 0)):
        for normalizer in (None, normalizers.Lowercase()):
            parts = {} if normalizer is None else {"normalizer": normalizer}
            saved, said = words(tmp_path / "saved.json", *known, *more, **parts), []
            output = tmp_path / f"{count}{normalizer}"
            run([text], output, vocab_size=None, tokenizer=saved, say=said.append)
            assert len(said) == count
            assert not count or said[0].startswith("1 of 501 tokens are unknown, and 4 of")


def test_a_failed_run_leaves_nothing_behind(tmp_path, write, text_folder):
    paths = [write("in/good.txt", b"good"), write("in/bad.txt", b"\xff")]
    saved = text_folder / "tokenizer.json"  # nothing to train: the flaw is met while writing
    with pytest.raises(UserError, match="not UTF-8"):
        run(paths, tmp_path / "out", vocab_size=None, tokenizer=saved)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, write, end):
    def interrupt(stage: str, *_: int) -> None:
        if stage == "encoding":
            assert list(tmp_path.glob(".out.partial-*"))
            raise end

    with pytest.raises(end):
        run([write("good.txt", b"good")], tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["good.txt"]


def test_requests_that_cannot_be_met_are_refused(tmp_path, write, text_folder):
    good, out = write("good.txt", b"good"), tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    saved = text_folder / "tokenizer.json"
    nameless = write("nameless.json", saved.read_text().replace("<|endoftext|>", "STOP").encode())
    foreign = write("foreign.json", b"{}")
    hollow = json.loads(saved.read_text()) | {"added_tokens": []}
    hollow["model"] |= {"vocab": {}, "merges": []}
    vocab = {"<|endoftext|>": 0, "known": 1}
    narrow = hollow | {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}}
    hollow, narrow = (
        write(f"{len(record['model'])}.json", json.dumps(record).encode())
        for record in (hollow, narrow)
    )
    os.mkfifo(tmp_path / "pipe")
    cases = [
        ([tmp_path / "pipe"], {}, r"pipe is a pipe or a device; .* write it to a file first"),
        ([tmp_path / "absent"], {}, r"absent: there is no such file or folder"),
        ([empty], {}, r"empty: no file looks like text"),
        ([tmp_path], {"suffixes": [".rs"]}, r"no file ends in \.rs"),
        ([write("nil.txt", b"")], {"skip_bad": True}, r"no document in it, 1 skipped"),
        ([good], {"vocab_size": 256}, r"--vocab-size 256: .* write 257 or more"),
        ([good], {"vocab_size": 10**9}, r"--vocab-size 1000000000: .* at most 16777216"),
        ([good], {"vocab_size": 10**20}, r"--vocab-size 10{20}: .* at most 16777216"),
        ([good], {"tokenizer": saved}, r"--vocab-size 300 and --tokenizer .* one of the two"),
        (
            [good],
            {"vocab_size": None, "tokenizer": foreign},
            r"foreign\.json is not a tokenizer\.json",
        ),
        ([good], {"vocab_size": None, "tokenizer": empty / "no"}, r"cannot be read"),
        ([good], {"vocab_size": None, "tokenizer": nameless}, r"has none of <\|endoftext\|>"),
        ([good], {"vocab_size": None, "tokenizer": hollow}, r"has none of <\|endoftext\|>"),
        ([good], {"vocab_size": None, "tokenizer": narrow}, r"cannot encode .*Missing \[UNK\]"),
    ]
    for inputs, options, message in cases:
        with pytest.raises(UserError, match=message):
            run(inputs, out, **options)
    assert not out.exists()


def test_an_existing_output_is_not_touched(tmp_path, write):
    path = write("a.txt", b"text")
    run([path], tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    with pytest.raises(UserError, match=r"--output .*out exists; .* name another one"):
        run([path], tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    with pytest.raises(UserError, match="cannot be written"):
        run([path], path / "out")


def test_progress_reaches_all_bytes_of_both_passes(tmp_path, write):
    seen = []
    write("a/1.txt", b"12345")
    write("a/2.txt", b"678")
    run([tmp_path / "a"], tmp_path / "out", progress=lambda *call: seen.append(call))
    assert seen == [("reading", 5, 8), ("reading", 8, 8), ("encoding", 5, 8), ("encoding", 8, 8)]


def test_the_vocabulary_is_trained_on_an_even_sample():
    kept = "".join(tokenize_module.sample((str(i % 10) for i in range(1000)), 0.3))
    assert len(kept) == 300
    assert {digit: kept.count(digit) for digit in set(kept)} == {"0": 100, "3": 100, "6": 100}
