import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from olmo_jax.data import shards
from olmo_jax.data.shards import file_digest
from olmo_jax.data.sources import held
from olmo_jax.data.token_manifest import expected_fingerprint, read_manifest, write_manifest
from olmo_jax.errors import UserError
from tests.data.folders import TEXTS, counting, open_folders, write_folder


def first_tokens(corpus, start: int, stop: int) -> list[int]:
    return [int(corpus.sequences[i].tokens[0]) for i in range(start, stop)]


def assert_same(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_is_a_permutation_of_the_windows_and_the_next_another(tmp_path):
    corpus = open_folders(counting(tmp_path / "a", 50, 4))
    epochs = [first_tokens(corpus, 50 * e, 50 * e + 50) for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 201, 4))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_window_is_consecutive_and_what_is_left_at_the_end_is_dropped(tmp_path):
    corpus = open_folders(write_folder(tmp_path / "a", [[1, 2, 3], [4, 5, 6, 7], [8, 9]]))
    rows = sorted(tuple(corpus.sequences[i].tokens.tolist()) for i in range(3))
    assert rows == [(0, 8, 9, 0), (1, 2, 3, 0), (4, 5, 6, 7)]
    shorter = open_folders(tmp_path / "a", length=5)
    assert {tuple(shorter.sequences[i].tokens.tolist()) for i in range(2)} == {
        (1, 2, 3, 0, 4),
        (5, 6, 7, 0, 8),
    }


def test_the_seed_orders_the_sequences(tmp_path):
    folder = counting(tmp_path / "a", 50, 4)
    orders = [first_tokens(open_folders(folder, seed=seed), 0, 100) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0][:50] != orders[2][:50]
    assert orders[0][50:] != orders[2][:50]  # seed 1 does not start with the second epoch of seed 0


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_any_split_of_the_rows_over_processes_gives_the_same_batch(tmp_path, num_processes):
    corpus = open_folders(counting(tmp_path / "a", 30, 4), counting(tmp_path / "b", 7, 4))
    whole = corpus.batch(24, range(8))
    share = 8 // num_processes
    parts = [corpus.batch(24, range(p * share, (p + 1) * share)) for p in range(num_processes)]
    assert_same(whole, [np.concatenate(leaves) for leaves in zip(*parts, strict=True)])
    np.testing.assert_array_equal(whole.sequence, range(8))


def test_read_ahead_batches_are_the_same_as_random_access_across_epochs_and_on_resuming(tmp_path):
    corpus = open_folders(counting(tmp_path / "a", 10, 4), threads=2, prefetch=3)
    rows = [1, 3]
    ahead = list(itertools.islice(corpus.batches(0, 4, rows), 6))
    for step, batch in enumerate(ahead):
        assert_same(batch, corpus.batch(4 * step, rows))
    resumed = list(itertools.islice(corpus.batches(8, 4, rows), 4))
    for left, right in zip(ahead[2:], resumed, strict=True):
        assert_same(left, right)


def test_another_batch_size_goes_on_with_the_same_stream(tmp_path):
    corpus = open_folders(counting(tmp_path / "a", 10, 4))
    large = corpus.batch(16, range(8))
    small = [corpus.batch(16, range(4)), corpus.batch(20, range(4))]
    np.testing.assert_array_equal(large.tokens, np.concatenate([b.tokens for b in small]))


def test_a_mixture_keeps_exact_proportions_and_each_source_its_own_order(tmp_path):
    a, b = counting(tmp_path / "a", 9, 4), counting(tmp_path / "b", 5, 4, first=1001)
    mixed = first_tokens(open_folders(a, b, weights=[0.7, 0.3]), 0, 60)
    from_b = [token for token in mixed if token > 1000]
    assert len(from_b) == 18
    assert from_b == first_tokens(open_folders(b), 0, 18)
    assert [t for t in mixed if t <= 1000] == first_tokens(open_folders(a), 0, 42)


def test_held_out_documents_are_in_no_window_and_all_others_are(tmp_path):
    documents = [[10 * i + j for j in range(1, 4)] for i in range(200)]
    corpus = open_folders(write_folder(tmp_path / "a", documents), eval_fraction=0.25)
    batches = corpus.held_out(8, 40)
    evaluated = {int(t) for b in batches for t in b.tokens[b.padding_mask]} - {0}
    trained = {int(t) for i in range(len(documents)) for t in corpus.sequences[i].tokens} - {0}
    assert not evaluated & trained
    assert evaluated | trained == {token for document in documents for token in document}
    assert 0.15 < len(evaluated) / 600 < 0.35


def test_the_split_knows_nothing_of_seed_length_and_other_sources(tmp_path):
    documents = [[10 * i + j for j in range(1, 4)] for i in range(100)]
    a, b = write_folder(tmp_path / "a", documents), write_folder(tmp_path / "b", documents[9:])
    alone = open_folders(a, eval_fraction=0.2).sources[0]
    other = open_folders(b, a, eval_fraction=0.2, seed=9, length=8, vocab_size=6000).sources[1]
    for left, right in ((alone.train, other.train), (alone.held_out, other.held_out)):
        np.testing.assert_array_equal(left.start, right.start)
        np.testing.assert_array_equal(left.ends, right.ends)


def test_the_hash_draws_the_asked_fraction_and_a_larger_one_holds_the_smaller():
    small, large = held("ab" * 32, 100_000, 0.01), held("ab" * 32, 100_000, 0.1)
    assert abs(small.mean() - 0.01) < 1e-3
    assert abs(large.mean() - 0.1) < 3e-3
    assert not (small & ~large).any()
    assert (held("cd" * 32, 100_000, 0.1) != large).any()


def test_a_process_reads_only_its_rows_of_an_evaluation(tmp_path):
    documents = [[10 * i + j for j in range(1, 4)] for i in range(60)]
    corpus = open_folders(write_folder(tmp_path / "a", documents), eval_fraction=0.4)
    whole, own = corpus.held_out(4, 9), corpus.held_out(4, 9, [1, 3])
    assert len(whole) == len(own) > 2
    for batch, part in zip(whole, own, strict=True):
        assert_same([leaf[[1, 3]] for leaf in batch], part)


def test_the_last_evaluation_batch_is_padded_and_none_is_all_padding(tmp_path):
    documents = [[i, i, i] for i in range(1, 40)]
    corpus = open_folders(write_folder(tmp_path / "a", documents), length=16, eval_fraction=0.3)
    num_tokens = corpus.sources[0].held_out.num_tokens
    for rows in (2, 3, 4, 1000):
        batches = corpus.held_out(rows, 100)
        assert [batch.tokens.shape for batch in batches] == [(rows, 16)] * len(batches)
        assert len(batches) == -(-num_tokens // (16 * rows))
        assert all(batch.padding_mask.any() for batch in batches)
        assert sum(batch.padding_mask.sum() for batch in batches) == num_tokens
        assert_same(batches[0], corpus.held_out(rows, 100)[0])
    assert not corpus.held_out(1000, 1)[0].padding_mask[-1].any()


def test_few_evaluation_batches_come_from_all_over_the_held_out_documents(tmp_path):
    folders = [counting(tmp_path / "a", 1, 40)]
    folders += [write_folder(tmp_path / f"{n}", [[i] * n for i in range(1, 100)]) for n in (3, 4)]
    corpus = open_folders(*folders, eval_fraction=0.5)
    tokens = np.concatenate([batch.tokens for batch in corpus.held_out(2, 2)])
    assert tokens[0, 0] < 50 < tokens[-1, 0]


def test_an_evaluation_in_which_no_label_counts_is_refused(tmp_path):
    folder = write_folder(tmp_path / "a", [[i, i, i] for i in range(1, 40)])
    held_out = open_folders(folder, eval_fraction=0.3).sources[0].held_out
    places = np.concatenate(
        [
            np.arange(start, start + size)
            for start, size in zip(held_out.start, np.diff(held_out.ends, prepend=0), strict=True)
        ]
    )
    mask = np.ones(4 * 39, bool)
    for counts in (0, 1):
        mask[places] = False
        # The first token of a row is no target.
        mask[places[: 2 * counts]] = True
        np.save(tmp_path / "mask.npy", mask)
        corpus = open_folders(folder, eval_fraction=0.3, label_mask=str(tmp_path / "mask.npy"))
        if counts:
            assert sum((batch.labels != -100).sum() for batch in corpus.held_out(2, 40)) == 1
            continue
        with pytest.raises(
            UserError, match=r"none of the \d+ rows of held-out documents has a lab"
        ):
            corpus.held_out(2, 40)


def test_a_label_mask_is_cut_along_the_tokens(tmp_path):
    folder = write_folder(tmp_path / "a", [list(range(1, 40))])
    mask = np.arange(40) % 3 != 0
    np.save(tmp_path / "mask.npy", mask)
    corpus = open_folders(folder, label_mask=str(tmp_path / "mask.npy"))
    batch = corpus.batch(0, range(10))
    for token, label in zip(
        batch.tokens[:, :-1].ravel(), batch.labels[:, :-1].ravel(), strict=True
    ):
        assert label == (token + 1 if mask[token] else -100)


def test_one_token_file_of_a_folder_is_the_same_source(tmp_path):
    folder = counting(tmp_path / "a", 10, 4)
    whole, one = open_folders(folder), open_folders(folder / "tokens_00000.npy")
    assert whole.fingerprint == one.fingerprint
    assert first_tokens(whole, 0, 20) == first_tokens(one, 0, 20)


def test_the_fingerprint_changes_with_all_that_orders_tokens(tmp_path):
    a, b = counting(tmp_path / "a", 10, 4), counting(tmp_path / "b", 11, 4)
    corpora = [
        open_folders(a),
        open_folders(b),
        open_folders(a, b),
        open_folders(a, b, weights=[1.0, 2.0]),
        open_folders(a, seed=1),
        open_folders(a, length=5),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == len(corpora)
    assert corpora[0].fingerprint == open_folders(a, threads=1, prefetch=1).fingerprint


def test_large_vocabularies_are_read_from_uint32(tmp_path):
    folder = write_folder(tmp_path / "a", [[70_000, 2, 3]], vocab_size=70_001, dtype="uint32")
    corpus = open_folders(folder, vocab_size=70_001)
    np.testing.assert_array_equal(corpus.batch(0, [0]).tokens, [[70_000, 2, 3, 0]])


def test_tokens_read_back_as_the_text_that_was_written(text_folder):
    corpus = open_folders(text_folder, length=64)
    text = "".join(corpus.decode(corpus.sequences[i].tokens) for i in range(10))
    assert any(line in text for line in TEXTS[:7])
    assert "<|endoftext|>Chapter" in text


def resave(path, change) -> None:
    np.save(path, change(np.load(path)))


def test_what_is_wrong_with_the_files_is_said_when_they_are_opened(tmp_path):
    name = "tokens_00000.npy"

    def folder(kind):
        return counting(tmp_path / kind, 10, 4)

    def spoil(kind, change):
        path = folder(kind) / name
        resave(path, change)
        return path.parent

    def cut(kind, num_bytes):
        path = folder(kind) / name
        path.write_bytes(path.read_bytes()[:num_bytes])
        return path.parent

    def edit(kind, file, text):
        (folder(kind) / file).write_text(text, encoding="latin-1")
        return tmp_path / kind

    def replace(kind, old, new):
        path = folder(kind) / "manifest.json"
        path.write_text(path.read_text().replace(old, new))
        return path.parent

    def without(kind, file):
        (folder(kind) / file).unlink()
        return tmp_path / kind

    def beyond(tokens):
        tokens[7] = 6000
        return tokens

    cases = {
        r"absent: there is no such folder": tmp_path / "absent",
        r"is a file and not a folder": without("1", name) / "manifest.json",
        r"no manifest\.json, so it is not a folder": without("2", "manifest.json"),
        r"manifest\.json is not a manifest of tokens": edit("3", "manifest.json", "{}"),
        r"not a manifest of tokens: the file: Invalid JSON": edit("4", "manifest.json", "no"),
        r"num_tokens=5, and its files have 41 together": replace(
            "19", '"num_tokens": 41,\n "num_documents"', '"num_tokens": 5,\n "num_documents"'
        ),
        r"own fingerprint \w+, so it was": replace("5", '"vocab_size": 5000', '"vocab_size": 400'),
        r"tokens_00000\.npy: there is no such file": without("6", name),
        r"is not a whole \.npy file": cut("7", -9),
        r"is not a whole \.npy file \(": cut("8", 20),
        r"tokens_00000\.npy is not a whole": edit("9", name, "foreign"),
        r"\.npy is not a whole .*magic string": edit("17", name, "PK\x03\x04"),
        r"\.npy is not a whole .*EOF in": edit("18", name, "\x93NUMPY\1\0\5\0((((("),
        r"holds float32\[41\]; a token file is one row of uint16": spoil(
            "10", lambda tokens: tokens.astype(np.float32)
        ),
        r"holds uint16\[41, 1\]; a token file": spoil("11", lambda tokens: tokens[:, None]),
        r"holds 40 tokens and its manifest says 41": spoil("12", lambda tokens: tokens[1:]),
        r"holds other tokens than its manifest names": spoil("13", lambda tokens: tokens[::-1]),
        r"token id 6000; model\.vocab_size=5000 allows 0 to 4999": spoil("14", beyond),
        r"tokens_1\.npy is no token file of": folder("15") / "tokens_1.npy",
        r"tokenizer\.json is not the tokenizer": edit("16", "tokenizer.json", "{}"),
    }
    for message, path in cases.items():
        with pytest.raises(UserError, match=message):
            open_folders(path)


def test_bytes_past_the_end_and_other_borders_are_noticed(tmp_path):
    folder = write_folder(tmp_path / "a", [[1, 2, 3]] * 20)
    resave(folder / "documents_00000.npy", lambda borders: borders[::-1])
    open_folders(folder)  # without a held-out share the borders are not needed
    with pytest.raises(UserError, match="other document borders"):
        open_folders(folder, eval_fraction=0.1)
    with (folder / "tokens_00000.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"has 292 bytes and its header says 288"):
        open_folders(folder)


def forged(folder: Path, borders: np.ndarray | None = None, **changed: object) -> Path:
    """Change a shard of a folder's manifest, and make the manifest agree with itself again."""
    manifest = read_manifest(folder)
    (shard,) = manifest.files
    if borders is not None:
        np.save(folder / shard.documents, borders)
        changed["documents_sha256"] = file_digest(folder / shard.documents)
    shard = shard.model_copy(update=changed)
    totals = {name: getattr(shard, name) for name in ("num_tokens", "num_documents")}
    manifest = manifest.model_copy(update={"files": (shard,), **totals})
    fingerprint = expected_fingerprint(manifest)
    write_manifest(folder, manifest.model_copy(update={"fingerprint": fingerprint}))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_documents": 21}, r"holds int64\[21\]; 21 documents, .* have int64\[22\] borders"),
        ({"num_documents": 10**9}, r"holds int64\[21\]; 1000000000 documents"),
        ({"num_documents": 3}, r"holds int64\[21\]; 3 documents"),
        ({"borders": np.arange(0, 84, 4.0)}, r"holds float64\[21\]"),
        ({"borders": np.zeros((21, 2), np.int64)}, r"holds int64\[21, 2\]"),
        ({"borders": np.arange(4, 88, 4)}, "holds borders that do not ascend from 0 to 80"),
        ({"borders": np.arange(0, 84, 4) * 100}, "holds borders that do not ascend from 0 to 80"),
        (
            {"borders": np.array([0, 900, *range(8, 84, 4)])},
            "holds borders that do not ascend from 0 to 80",
        ),
    ],
    ids=str,
)
def test_borders_that_do_not_fit_their_tokens_are_refused(tmp_path, change, words):
    folder = forged(write_folder(tmp_path / "a", [[1, 2, 3]] * 20), **change)
    with pytest.raises(UserError, match=rf"documents_00000\.npy {words}"):
        open_folders(folder, eval_fraction=0.1)


@pytest.mark.parametrize("key", ["tokens", "documents"])
@pytest.mark.parametrize("where", ["../secret/{}", "/etc/{}", "below/{}", "..", ".", "", "a\\{}"])
def test_a_manifest_that_names_what_is_outside_of_its_folder_is_refused(tmp_path, key, where):
    folder = write_folder(tmp_path / "a", [[1, 2, 3]] * 20)
    shutil.copytree(folder, tmp_path / "secret")
    name = getattr(read_manifest(folder).files[0], key)
    forged(folder, **{key: where.format(name)})
    with pytest.raises(UserError, match=r"names the file '.*', which is no file of its folder"):
        open_folders(folder, eval_fraction=0.1)


def test_what_is_wrong_with_the_request_is_said_when_it_is_opened(tmp_path):
    a = counting(tmp_path / "a", 10, 4)
    b = write_folder(tmp_path / "b", [[1, 2]])
    c = counting(tmp_path / "c", 10, 4)
    text = (c / "manifest.json").read_text()
    masks = {
        "short": np.ones(40, bool),
        "float": np.ones(41),
        "wide": np.ones((41, 1), bool),
    }
    for name, mask in masks.items():
        np.save(tmp_path / name, mask)
    (tmp_path / "text.npy").write_text(text)
    np.savez(tmp_path / "archive.npz", np.ones(41, bool))
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 no archive")
    cases = [
        ((), {}, r"data\.sources is empty"),
        ((a,), {"vocab_size": 4999}, r"vocabulary of 5000 and model\.vocab_size=4999; .*=5000"),
        ((b,), {}, r"b has 3 training tokens; one sequence takes train\.sequence_length=4"),
        ((a,), {"eval_fraction": 0.01}, r"eval_fraction=0\.01 holds out none of 1 documents"),
        ((a,), {"label_mask": "short.npy"}, r"40 entries and .*a has 41 tokens"),
        ((a,), {"label_mask": "float.npy"}, r"holds float64\[41\]; .* bool or uint8"),
        ((a,), {"label_mask": "wide.npy"}, r"holds bool\[41, 1\]"),
        ((a,), {"label_mask": "none.npy"}, r"label_mask .*none\.npy: there is no such file"),
        ((a,), {"label_mask": "text.npy"}, r"label_mask .*text\.npy is not a whole \.npy"),
        ((a,), {"label_mask": "archive.npz"}, r"archive\.npz is not a whole \.npy .*magic string"),
        ((a,), {"label_mask": "zip.npy"}, r"zip\.npy is not a whole \.npy .*numpy\.save"),
    ]
    for folders, options, message in cases:
        if "label_mask" in options:
            options["label_mask"] = str(tmp_path / options["label_mask"])
        with pytest.raises(UserError, match=message):
            open_folders(*folders, **options)
    with pytest.raises(UserError, match=r"eval_fraction=0\.0 holds no document out"):
        open_folders(a).held_out(2, 2)
    with pytest.raises(UserError, match=r"a has no tokenizer\.json"):
        open_folders(a).decode([1])


def test_tokens_are_named_once_however_they_are_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = counting(tmp_path / "a", 10, 4), counting(tmp_path / "a" / "b", 10, 4, first=41)
    (tmp_path / "link").symlink_to(a)
    copy = tmp_path / "copy"
    shutil.copytree(a, copy)
    file, copied = Path("a/tokens_00000.npy"), copy / "tokens_00000.npy"
    again = [(a, a), (a, Path("a")), (a, Path("a/../a")), (a, Path("link")), (a, file), (file, a)]
    again += [(a, copy), (a, copied), (file, copy), (file, copied)]
    for first, second in again:
        message = f"names {re.escape(str(first))} and {re.escape(str(second))}, .* named once"
        with pytest.raises(UserError, match=message):
            open_folders(b, first, second)
    open_folders(a, b)  # a folder inside another one has tokens of its own
    open_folders(a / "tokens_00000.npy", b / "tokens_00000.npy")


def test_a_source_that_has_a_shard_or_whole_blocks_of_another_is_refused(tmp_path, monkeypatch):
    """A text, the same with more behind it, and one that shares the rest of a last block alone."""
    text, end = [[i] * 7 for i in range(1, 9)], [[99] * 7]
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)  # four documents of eight tokens
    monkeypatch.setattr(shards, "SHARD_TOKENS", 32)
    a, more = write_folder(tmp_path / "a", text), write_folder(tmp_path / "more", text + end)
    with pytest.raises(UserError, match=r"names .*a and .*more, which hold the same tokens"):
        open_folders(a, more)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1 << 20)
    longer = write_folder(tmp_path / "longer", text + end)
    longest = write_folder(tmp_path / "longest", [*text, [100] * 7, *end])
    with pytest.raises(UserError, match=r"names .*longer and .*longest, which hold the same"):
        open_folders(longer, longest)
    other = write_folder(tmp_path / "other", [[i] * 7 for i in range(21, 29)] + end)
    open_folders(longer, other)


def test_an_unreadable_tokenizer_is_named(tmp_path):
    folder = counting(tmp_path / "a", 10, 4)
    (folder / "tokenizer.json").write_text("none")  # what the manifest of `counting` names
    with pytest.raises(UserError, match=r"a/tokenizer\.json is not a tokenizer\.json of Hugging"):
        open_folders(folder).decode([1])


@pytest.mark.parametrize("name", ["tokens_00000.npy", "mask.npy"])
def test_a_file_without_permission_is_not_called_broken(tmp_path, monkeypatch, name):
    def refuse(path, **_):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_memmap(path, **_)

    folder, mask, open_memmap = (
        counting(tmp_path / "a", 10, 4),
        tmp_path / "mask.npy",
        npy.open_memmap,
    )
    np.save(mask, np.ones(41, bool))
    monkeypatch.setattr(npy, "open_memmap", refuse)
    with pytest.raises(PermissionError, match=name):
        open_folders(folder, label_mask=str(mask))


def test_sources_of_two_tokenizers_are_refused(tmp_path, text_folder):
    other = counting(tmp_path / "a", 10, 4)
    with pytest.raises(UserError, match=r"with another tokenizer than .*--tokenizer .*tokenizer"):
        open_folders(text_folder, other)


def test_a_token_beyond_the_vocabulary_that_appears_later_stops_the_batches(tmp_path):
    folder = counting(tmp_path / "a", 10, 4)
    corpus = open_folders(folder)
    mapped = np.load(folder / "tokens_00000.npy", mmap_mode="r+")
    mapped[:] = 6000
    mapped.flush()
    with pytest.raises(UserError, match="token id 6000"):
        next(iter(corpus.batches(0, 2, [0, 1])))
