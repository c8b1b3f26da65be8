"""Every backend is the same attention, for unkind inputs, in values and in gradients."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.arch import sizes
from olmo_jax.arch.sizes import block_pairs, block_size
from olmo_jax.errors import UserError
from olmo_jax.ops.attention import attention, default_backend

SCALE = 0.25


def _inputs(length, *, heads=4, kv_heads=2, width=8, sequences=2, dtype="float32", factor=1.0):
    rng = np.random.default_rng(length + heads * kv_heads)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, width), (heads, width)]
    arrays = [rng.normal(size=(sequences, length, *shape)) for shape in shapes]
    q, k, v, d_out = (jnp.asarray(x, jnp.dtype(dtype)) for x in arrays)
    return q * factor, k, v, d_out


def _documents(length, *, padding=0):
    """Odd lengths, other borders in each row; the last `padding` positions of row 0 are padding."""
    borders = np.zeros((2, length), np.int32)
    borders[0, [3, length // 2]] = 1
    borders[1, [1, 2, length - 2]] = 1
    ids = np.cumsum(borders, axis=1, dtype=np.int32)
    ids[0, length - padding :] = -1
    return jnp.asarray(ids)


def _value_and_gradients(*inputs, window, backend, scale=SCALE):
    options = {"window": window, "backend": backend, "scale": scale}
    return _compiled(*inputs, **options, block=sizes.BLOCK)


@partial(jax.jit, static_argnames=("window", "backend", "scale", "block"))
def _compiled(q, k, v, d_out, segment_ids, *, window, backend, scale, block):
    """Give one program for each length of a block, which tests change."""
    assert block == sizes.BLOCK

    def attend(q, k, v):
        return attention(
            q, k, v, segment_ids=segment_ids, window=window, scale=scale, backend=backend
        )

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


def _numpy_attention(q, k, v, segment_ids, window, scale):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, i, n in np.ndindex(q.shape[:3]):
        keys = [
            j
            for j in range(i + 1)
            if (window is None or i - j < window)
            and (segment_ids is None or segment_ids[b, i] == segment_ids[b, j] >= 0)
        ]
        if keys:
            head = n // (q.shape[2] // k.shape[2])
            logits = k[b, keys, head] @ q[b, i, n] * scale
            weights = np.exp(logits - logits.max())
            out[b, i, n] = weights / weights.sum() @ v[b, keys, head]
    return out


def _assert_agree(inputs, segment_ids, window, *, tolerance=2e-6, scale=SCALE):
    """Compare relative to the largest entry of an array, and to the terms that cancel in it.

    A gradient of a logit is a difference of terms of order 1, then multiplied by `scale`.
    """
    arguments = {"window": window, "scale": scale}
    expected = _value_and_gradients(*inputs, segment_ids, backend="dense", **arguments)
    actual = _value_and_gradients(*inputs, segment_ids, backend="blockwise", **arguments)
    terms = (0.0, 1e-5 * scale, 1e-5 * scale, 0.0)
    chex.assert_tree_all_finite(actual)
    for ours, theirs, rounding in zip(actual, expected, terms, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max() + rounding


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of at most 8 positions, so that few positions make several."""
    monkeypatch.setattr(sizes, "BLOCK", 8)


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.matrix), 5])
def test_attention_is_the_softmax_of_what_is_visible(small_blocks, backend, window):
    inputs, segment_ids = _inputs(19), _documents(19, padding=4)
    out = _value_and_gradients(*inputs, segment_ids, window=window, backend=backend)[0]
    expected = _numpy_attention(*inputs[:3], np.asarray(segment_ids), window, SCALE)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("length", "kv_heads", "window", "packed"),
    [
        (37, 2, 9, True),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for length in (16, 23)
            for case in [
                (length, 4, None, True),
                (length, 1, None, True),
                (length, 2, 1, True),
                (length, 2, 3, False),
                (length, 1, 8, True),
                (length, 4, 100, True),
                (length, 2, None, False),
            ]
        ),
        pytest.param(7, 2, None, True, marks=pytest.mark.matrix),
    ],
)
def test_backends_agree_in_values_and_gradients(small_blocks, length, kv_heads, window, packed):
    segment_ids = _documents(length, padding=2) if packed else None
    _assert_agree(_inputs(length, kv_heads=kv_heads), segment_ids, window)


def test_backends_agree_over_blocks_of_the_real_size():
    inputs = _inputs(sizes.BLOCK + 45, sequences=2)
    _assert_agree(inputs, _documents(sizes.BLOCK + 45, padding=9), 100)


def test_backends_agree_in_bfloat16(small_blocks):
    # The weights are rounded to 8 bits before the product with the values, once per backend.
    _assert_agree(_inputs(21, dtype="bfloat16"), _documents(21), None, tolerance=2e-2)


@pytest.mark.parametrize("sign", [1.0, pytest.param(-1.0, marks=pytest.mark.matrix)])
def test_extreme_logits_stay_finite_and_exact(small_blocks, sign):
    # Logits of 1e4 carry a rounding of 1e-3 each, and the backends multiply in another order.
    inputs, segment_ids, tolerance = _inputs(21, factor=sign), _documents(21, padding=3), 5e-3
    _assert_agree(inputs, segment_ids, None, scale=1e4, tolerance=tolerance)
    options = {"window": None, "backend": "blockwise", "scale": 1e4}
    out = _value_and_gradients(*inputs, segment_ids, **options)[0]
    expected = _numpy_attention(*inputs[:3], np.asarray(segment_ids), None, 1e4)
    np.testing.assert_allclose(out, expected, atol=tolerance * np.abs(expected).max())


def test_rows_that_see_nothing_give_zero_and_no_gradient(small_blocks):
    inputs = _inputs(18)
    segment_ids = jnp.full((2, 18), -1, jnp.int32).at[1, :9].set(0)
    for backend in ("dense", "blockwise"):
        results = _value_and_gradients(*inputs, segment_ids, window=None, backend=backend)
        for result in results:
            assert not np.asarray(result[0]).any()
            assert not np.asarray(result[1, 9:]).any()
            assert np.asarray(result[1, :9]).any()


def test_a_document_attends_as_if_it_were_alone(small_blocks):
    q, k, v, d_out = _inputs(20)
    segment_ids = jnp.asarray(np.repeat([[0] * 7 + [1] * 13], 2, axis=0), jnp.int32)
    packed = _value_and_gradients(q, k, v, d_out, segment_ids, window=4, backend="blockwise")
    alone = [x[:, 7:] for x in (q, k, v, d_out)]
    expected = _value_and_gradients(*alone, None, window=4, backend="dense")
    for ours, theirs in zip(packed, expected, strict=True):
        np.testing.assert_allclose(ours[:, 7:], theirs, atol=2e-6)


def test_the_list_has_each_pair_that_is_seen_and_no_other(small_blocks):
    for length, window in ((1, None), (8, 1), (33, None), (33, 1), (40, 9), (40, 10), (41, 100)):
        size = block_size(length)
        assert size <= 8
        i, j = np.arange(-(-length // size) * size)[:, None], np.arange(-(-length // size) * size)
        seen = (j <= i) & (True if window is None else i - j < window)
        expected = sorted({(int(a) // size, int(b) // size) for a, b in np.argwhere(seen)})
        assert block_pairs(length, window).tolist() == [list(pair) for pair in expected]


def test_attention_needs_a_fraction_of_the_dense_memory_and_no_conditional():
    inputs = _inputs(1024, sequences=1)
    temporary = {}
    for backend in ("dense", "blockwise"):
        options = {"window": None, "backend": backend, "scale": SCALE, "block": sizes.BLOCK}
        compiled = _compiled.lower(*inputs, None, **options).compile()
        temporary[backend] = compiled.memory_analysis().temp_size_in_bytes
        assert " conditional(" not in compiled.as_text()
    assert temporary["blockwise"] < 0.25 * temporary["dense"]


def test_attention_is_the_same_inside_shard_map_and_checkpoint(small_blocks):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    inputs, segment_ids = _inputs(19), _documents(19)
    rows = PartitionSpec("data")

    def step(q, k, v, d_out, segment_ids):
        attend = partial(attention, segment_ids=segment_ids, window=6, scale=SCALE)
        policy = jax.checkpoint_policies.save_only_these_names("attention")
        out, pull = jax.vjp(jax.checkpoint(attend, policy=policy), q, k, v)
        return out, *pull(d_out)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=True)
    actual = jax.jit(sharded)(*inputs, segment_ids)
    expected = _value_and_gradients(*inputs, segment_ids, window=6, backend="dense")
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)


@pytest.mark.parametrize(
    ("dtype", "width", "length", "message"),
    [
        ("float32", 8, 8, "dtype float32 is not bfloat16 or float16; use backend=blockwise"),
        ("bfloat16", 12, 8, "head_dim=12 is not a multiple of 8 up to 128; use"),
        ("bfloat16", 8, 7, "with segment ids the length must be even, and 7 is odd; use"),
    ],
)
def test_cudnn_refuses_what_it_cannot_honour(dtype, width, length, message):
    q, k, v, _ = _inputs(length, width=width, dtype=dtype)
    segment_ids = _documents(length)
    with pytest.raises(UserError, match=message):
        attention(q, k, v, segment_ids=segment_ids, window=None, scale=SCALE, backend="cudnn")


def test_an_unknown_backend_is_refused_with_the_known_ones():
    q, k, v, _ = _inputs(4)
    with pytest.raises(UserError, match=r"backend=flash .* use one of blockwise, dense, cudnn"):
        attention(q, k, v, segment_ids=None, window=None, scale=SCALE, backend="flash")


def test_the_default_off_gpu_is_blockwise():
    assert default_backend(jnp.bfloat16, 64, 8, segmented=False) == "blockwise"
