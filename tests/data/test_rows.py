import numpy as np

from olmo_jax.data.rows import assemble
from olmo_jax.data.sources import Row


def row(*tokens: int, unwanted: tuple[int, ...] = ()) -> Row:
    wanted = np.ones(len(tokens), bool)
    wanted[list(unwanted)] = False
    return Row(np.array(tokens, np.int32), wanted)


def batch_of(*rows: Row, length: int = 6, document_attention: bool = True):
    return assemble(
        rows,
        list(range(len(rows))),
        length=length,
        eos_id=0,
        document_attention=document_attention,
    )


def test_labels_are_the_next_tokens_and_the_last_one_is_ignored():
    batch = batch_of(row(5, 6, 0, 7, 8, 9))
    np.testing.assert_array_equal(batch.labels, [[6, 0, 7, 8, 9, -100]])


def test_a_document_ends_with_its_eos_and_positions_restart_after_it():
    batch = batch_of(row(5, 6, 0, 7, 0, 9), row(0, 0, 4, 5, 6, 0))
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2, 2, 3], [1, 2, 3, 3, 3, 3]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])


def test_without_document_attention_a_row_is_one_document():
    batch = batch_of(row(5, 6, 0, 7, 0, 9), row(4, 0), document_attention=False)
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 6, [1, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]])


def test_a_masked_token_is_no_target_and_still_an_input():
    batch = batch_of(row(5, 6, 7, 8, 9, 0, unwanted=(0, 2, 5)))
    np.testing.assert_array_equal(batch.labels, [[6, -100, 8, 9, -100, -100]])
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 0]])
    assert np.asarray(batch.padding_mask).all()


def test_padding_is_not_real_and_neither_target_nor_document():
    batch = batch_of(row(5, 6, 0), row())
    np.testing.assert_array_equal(batch.padding_mask, [[True] * 3 + [False] * 3, [False] * 6])
    np.testing.assert_array_equal(batch.labels, [[6, 0] + [-100] * 4, [-100] * 6])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 0, 0, 0], [0] * 6])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 0, 0], [0] * 6])


def test_every_leaf_has_the_type_that_the_step_takes():
    batch = batch_of(row(5, 6, 0, 7, 0, 9))
    assert batch.padding_mask.dtype == bool
    assert {leaf.dtype.name for leaf in batch if leaf is not batch.padding_mask} == {"int32"}
