import pytest

from olmo_jax.data.show import show
from olmo_jax.errors import UserError
from tests.data.folders import open_folders, write_folder


def test_a_batch_is_shown_with_its_documents_and_counts(text_folder):
    corpus = open_folders(text_folder, length=64)
    text = show(corpus, 3, 2)
    batch = corpus.batch(4, range(2))
    assert text.startswith("step 3: sequences 4 to 5, 2 rows of 64 positions, 128 tokens, 126 in")
    for row in range(2):
        assert (
            f"=== row {row}: 64 tokens, 63 in the loss, {batch.segment_ids[row].max()} doc" in text
        )
        first = batch.tokens[row][batch.segment_ids[row] == 1]
        assert f"--- document 1: {len(first)} tokens\n{corpus.decode(first)}" in text


def test_a_long_document_is_cut_in_its_middle(text_folder):
    text = show(open_folders(text_folder, length=64), 1, 4, document_chars=20)
    assert "characters ...]" in text
    assert max(len(line) for line in text.splitlines()[1:]) < 60


def test_steps_count_from_one(tmp_path):
    corpus = open_folders(write_folder(tmp_path / "a", [[1, 2, 3]]))
    with pytest.raises(UserError, match="--step 0: steps count from 1"):
        show(corpus, 0, 2)
