"""The attention module against one query at a time in NumPy, option by option."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from olmo_jax.arch.parameters import block
from olmo_jax.config.records import ModelConfig, RopeConfig
from olmo_jax.model.attention import Attention
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.rope import inverse_frequencies

SMALL = {"d_model": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
PLAIN = {**SMALL, "qk_norm": "none", "rope": RopeConfig(theta=100.0)}
LENGTH = 9


def _module(**fields):
    """Build the module and give every leaf, gains and biases too, values that show."""
    model = ModelConfig(**{**PLAIN, **fields})
    make = Initialiser(jax.random.key(0), model, block(model, routed=False))
    module = Attention(model, make.inside("attention"))
    graph, state = nnx.split(module)
    rng = np.random.default_rng(0)
    values = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        nnx.to_pure_dict(state),
    )
    return nnx.merge(graph, values), values


def _batch(documents=(4, 5), sequences=2):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(sequences, LENGTH, SMALL["d_model"])), jnp.float32)
    positions = np.concatenate([np.arange(length) for length in documents])
    segment_ids = np.repeat(np.arange(len(documents)), documents)
    rows = [np.tile(row, (sequences, 1)).astype(np.int32) for row in (positions, segment_ids)]
    return x, *map(jnp.asarray, rows)


def _run(module, x, positions, segment_ids, window):
    """Call the module as one program, which compiles faster than its operations one by one."""

    def call(x, positions, segment_ids):
        return module(x, positions=positions, segment_ids=segment_ids, window=window)

    return np.asarray(jax.jit(call)(x, positions, segment_ids))


def _norm(x, gain, dims, eps=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=dims, keepdims=True) + eps) * gain


def _turn(x, positions, inverse):
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * positions[..., None, None] * inverse
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _attend(q, k, v, segment_ids, window):
    out = np.zeros_like(q)
    for b, i, n in np.ndindex(q.shape[:3]):
        keys = [j for j in range(i + 1) if segment_ids[b, i] == segment_ids[b, j]]
        keys = [j for j in keys if window is None or i - j < window]
        logits = k[b, keys, n // 2] @ q[b, i, n] / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max())
        out[b, i, n] = weights / weights.sum() @ v[b, keys, n // 2]
    return out


def _expected(model, values, x, positions, segment_ids, window):
    """Follow the order of operations of the reference, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), values)
    x, positions, segment_ids = np.asarray(x, np.float64), np.asarray(positions), segment_ids
    q, k, v = (np.einsum("bld,dnh->blnh", x, p[name]) for name in "qkv")
    if model.attention_bias:
        q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
    if model.clip_qkv is not None:
        q, k, v = (np.clip(part, -model.clip_qkv, model.clip_qkv) for part in (q, k, v))
    if model.qk_norm != "none":
        dims = (-2, -1) if model.qk_norm == "full" else -1
        q, k = _norm(q, p["q_norm"]["gain"], dims), _norm(k, p["k_norm"]["gain"], dims)
    inverse = inverse_frequencies(model.rope, model.head_dim, scaled=False)
    q, k = _turn(q, positions, inverse), _turn(k, positions, inverse)
    if model.scalable_softmax:
        q = q * np.log(positions + 1)[..., None, None] * p["softmax_scale"][:, None]
    out = _attend(q, k, v, np.asarray(segment_ids), window)
    if model.attention_gate != "none":
        gate = 1 / (1 + np.exp(-np.tensordot(x, p["gate"], 1)))
        out = out * (gate if gate.ndim == 4 else gate[..., None])
    out = np.einsum("blnh,nhd->bld", out, p["out"])
    return out + p["out_bias"] if model.attention_bias else out


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        (
            {
                "attention_bias": True,
                "clip_qkv": 1.5,
                "qk_norm": "full",
                "scalable_softmax": True,
                "attention_gate": "headwise",
            },
            3,
        ),
        *(
            pytest.param(fields, None, marks=pytest.mark.matrix)
            for fields in [
                {},
                {"attention_bias": True},
                {"clip_qkv": 0.7},
                {"qk_norm": "head"},
                {"qk_norm": "head_gains"},
                {"qk_norm": "full"},
                {"scalable_softmax": True},
                {"attention_gate": "headwise"},
                {"attention_gate": "elementwise", "attention_gate_full_precision": False},
            ]
        ),
    ],
)
def test_module_follows_the_order_of_the_reference(fields, window):
    module, values = _module(**fields)
    x, positions, segment_ids = _batch()
    actual = _run(module, x, positions, segment_ids, window)
    expected = _expected(module.model, values, x, positions, segment_ids, window)
    np.testing.assert_allclose(actual, expected, atol=3e-5 * np.abs(expected).max())


def test_parameters_have_the_names_and_dims_that_checkpoints_and_rules_know():
    fields = {
        "attention_bias": True,
        "qk_norm": "head_gains",
        "scalable_softmax": True,
        "attention_gate": "elementwise",
    }
    module, _ = _module(**fields)
    described = block(ModelConfig(**{**PLAIN, **fields}), routed=False)
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        name = ".".join(map(str, path))
        found[name] = leaf.shape, described[f"attention.{name}"].dims
    heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
    assert found == {
        "q": ((12, 4, 8), ("d_model", *heads)),
        "k": ((12, 2, 8), ("d_model", *kv_heads)),
        "v": ((12, 2, 8), ("d_model", *kv_heads)),
        "out": ((4, 8, 12), (*heads, "d_model")),
        "q_bias": ((4, 8), heads),
        "k_bias": ((2, 8), kv_heads),
        "v_bias": ((2, 8), kv_heads),
        "out_bias": ((12,), ("d_model",)),
        "q_norm.gain": ((4, 8), heads),
        "k_norm.gain": ((2, 8), kv_heads),
        "gate": ((12, 4, 8), ("d_model", *heads)),
        "softmax_scale": ((4,), ("heads",)),
    }


def test_a_document_is_the_same_wherever_it_stands_in_its_row():
    module, _ = _module(scalable_softmax=True)
    x, positions, segment_ids = _batch(documents=(4, 5))
    packed = _run(module, x, positions, segment_ids, None)
    alone = _run(module, x[:, 4:], positions[:, 4:], None, None)
    np.testing.assert_allclose(packed[:, 4:], alone, atol=1e-4)


def test_the_first_query_of_a_document_is_zero_under_scalable_softmax():
    """So it ignores its key: whatever multiplies the keys, its output is its value."""
    module, _ = _module(scalable_softmax=True)
    x, positions, _ = _batch(documents=(4, 5))
    before = _run(module, x, positions, None, None)
    module.k[...] = module.k[...] * 3.0
    after = _run(module, x, positions, None, None)
    np.testing.assert_array_equal(before[:, [0, 4]], after[:, [0, 4]])
    assert np.abs(before - after)[:, [1, 2, 3, 5]].min(axis=-1).all()


def test_rotary_positions_can_be_left_to_the_windowed_layers():
    module, _ = _module(rope=RopeConfig(on_full_attention=False))
    x, positions, _ = _batch(documents=(9,))

    def attend(positions, window):
        return _run(module, x, positions, None, window)

    stretched = positions * 7
    np.testing.assert_array_equal(attend(positions, None), attend(stretched, None))
    assert np.abs(attend(positions, 9) - attend(stretched, 9)).max() > 1e-2


def test_every_gradient_of_bfloat16_compute_is_float32():
    module, values = _module(attention_bias=True, qk_norm="head", attention_gate="headwise")
    graph, _ = nnx.split(module)
    x, positions, segment_ids = _batch()

    def loss(values):
        out = nnx.merge(graph, values)(
            x.astype(jnp.bfloat16), positions=positions, segment_ids=segment_ids, window=None
        )
        assert out.dtype == jnp.bfloat16
        return out.sum(dtype=jnp.float32)

    slopes = jax.jit(jax.grad(loss))(values)
    chex.assert_tree_all_finite(slopes)
    for slope in jax.tree.leaves(slopes):
        assert slope.dtype == jnp.float32
        assert np.abs(slope).max() > 0.0
