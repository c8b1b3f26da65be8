"""Which tensor is which leaf, and where its rows and columns go."""

import numpy as np
import pytest

from olmo_jax.arch.layers import layer_groups
from olmo_jax.config.records import WindowConfig
from olmo_jax.interop.weights import combine, separate, tensor_shapes
from tests.interop.small import small, values

EVERYTHING = {
    "peri": {},
    "reordered": {"norm": "reordered", "qk_norm": "head_gains", "attention_gate": "headwise"},
    "full": {"qk_norm": "full", "attention_bias": True, "tie_embeddings": True},
    "elementwise": {"attention_gate": "elementwise", "scalable_softmax": True},
    "bare": {"shared_hidden": 0, "embedding_norm": False, "num_dense_layers": 0},
    "dense": {"num_dense_layers": 6},
}


@pytest.fixture(params=EVERYTHING.values(), ids=EVERYTHING.keys())
def model(request):
    return small(**request.param)


def test_separating_and_combining_are_inverse(model):
    leaves = values(model)
    back = combine(model, separate(model, leaves))
    assert {k: v.tolist() for k, v in back.items()} == {k: v.tolist() for k, v in leaves.items()}


def test_shapes_are_known_without_the_weights(model):
    tensors = separate(model, values(model))
    assert tensor_shapes(model) == {name: tensor.shape for name, tensor in tensors.items()}


FORCED_LAST = {"windows": WindowConfig(pattern=(4, -1))}
"""The last layer sees all where the pattern has a window: it stands behind the body."""


def test_layers_keep_their_order_through_leading_body_and_trailing():
    model = small(**FORCED_LAST)
    plan = layer_groups(model)
    assert (plan.leading, plan.body, plan.trailing) == ((0,), (1, 2, 3, 4), (5,))
    tensors = separate(model, values(model))
    for layer in range(6):
        tensors[f"model.layers.{layer}.self_attn.q_norm.weight"] = np.full(4, layer, np.float32)
    leaves = combine(model, tensors)
    gain = "attention.q_norm.gain"
    assert leaves[f"leading.0.{gain}"].tolist() == [0] * 4
    assert leaves[f"body.{gain}"][:, 0].tolist() == [1, 2, 3, 4]
    assert leaves[f"trailing.0.{gain}"].tolist() == [5] * 4


def test_up_comes_before_gate_and_matrices_are_transposed():
    model = small(**FORCED_LAST)
    leaves = values(model)
    tensors = separate(model, leaves)
    layer, row, expert = "model.layers.3", 2, 1
    up_gate = leaves["body.moe.experts.up_gate"][row, expert]
    prefix = f"{layer}.mlp.experts.{expert}"
    np.testing.assert_array_equal(tensors[f"{prefix}.up_proj.weight"], up_gate[:, :5].T)
    np.testing.assert_array_equal(tensors[f"{prefix}.gate_proj.weight"], up_gate[:, 5:].T)
    down = leaves["body.moe.experts.down"][row, expert]
    np.testing.assert_array_equal(tensors[f"{prefix}.down_proj.weight"], down.T)


def test_heads_are_consecutive_rows_of_a_projection():
    model = small()
    leaves = values(model)
    tensors = separate(model, leaves)
    q, out = leaves["leading.0.attention.q"], leaves["leading.0.attention.out"]
    head = slice(2 * 4, 3 * 4)
    prefix = "model.layers.0.self_attn"
    np.testing.assert_array_equal(tensors[f"{prefix}.q_proj.weight"][head], q[:, 2].T)
    np.testing.assert_array_equal(tensors[f"{prefix}.o_proj.weight"][:, head], out[2].T)


@pytest.mark.parametrize(
    ("fields", "name", "shape"),
    [
        ({"qk_norm": "full"}, "q_norm.weight", (16,)),
        ({"qk_norm": "full"}, "k_norm.weight", (8,)),
        ({"qk_norm": "head_gains"}, "k_norm.weight", (2, 4)),
        ({"attention_bias": True}, "q_proj.bias", (16,)),
        ({"attention_gate": "headwise"}, "g_proj.weight", (4, 8)),
        ({"attention_gate": "elementwise"}, "g_proj.weight", (16, 8)),
        ({"scalable_softmax": True}, "ssmax_scale", (4,)),
    ],
)
def test_optional_tensors_have_the_names_and_shapes_of_the_class(fields, name, shape):
    assert tensor_shapes(small(**fields))[f"model.layers.5.self_attn.{name}"] == shape
