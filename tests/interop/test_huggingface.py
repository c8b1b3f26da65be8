"""Olmo3MoeForCausalLM in and out: the reference's numbers, exact round trips, refusals."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from olmo_jax import model as oracle
from olmo_jax.config.records import RouterConfig
from olmo_jax.errors import UserError
from olmo_jax.interop.huggingface import from_huggingface, load, save, to_huggingface
from olmo_jax.interop.weights import tensor_shapes
from tests.interop.small import small, values

GOLDEN = Path(__file__).parents[1] / "golden"


class Ran(NamedTuple):
    expected: dict
    reference_gradients: dict
    logits: np.ndarray
    loss: float
    gradients: dict


@pytest.fixture(scope="module", params=["olmo3moe_peri_softmax", "olmo3moe_peri_full_attention"])
def ran(request):
    """The reference's model, run here: forward and backward."""
    folder = GOLDEN / request.param
    config, params = load(folder)
    expected = dict(np.load(folder / "expected.npz"))
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    labels = jnp.asarray(expected["labels"], jnp.int32)
    logits = jax.jit(partial(oracle.apply, config))(params, tokens)
    value_and_grad = jax.jit(jax.value_and_grad(partial(oracle.loss, config)))
    loss, gradients = value_and_grad(params, tokens, labels)
    return Ran(
        expected=expected,
        reference_gradients=load_file(folder / "grads.safetensors"),
        logits=np.asarray(logits),
        loss=float(loss),
        gradients=to_huggingface(config, gradients),
    )


def test_logits_and_loss_are_the_references(ran):
    np.testing.assert_allclose(ran.logits, ran.expected["logits"], rtol=0, atol=5e-6)
    np.testing.assert_allclose(ran.loss, ran.expected["loss"], rtol=2e-6)


def test_every_gradient_is_the_references(ran):
    assert set(ran.gradients) == set(ran.reference_gradients)
    for name, reference in ran.reference_gradients.items():
        error = np.linalg.norm(ran.gradients[name] - reference)
        assert error <= 2e-5 * np.linalg.norm(reference), name


def _equal(left, right):
    return set(left) == set(right) and all(np.array_equal(left[k], right[k]) for k in left)


def test_a_saved_model_is_loaded_exactly(tmp_path):
    model = small()
    params = values(model)
    save(tmp_path, model, params)
    config, loaded = load(tmp_path)
    assert config == model
    assert _equal(loaded, params)


def test_the_references_folder_is_written_back_exactly(tmp_path):
    folder = GOLDEN / "olmo3moe_peri_softmax"
    save(tmp_path, *load(folder))
    assert _equal(
        load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    )
    assert load(tmp_path)[0] == load(folder)[0]


def test_bfloat16_leaves_are_saved_as_such_and_loaded_as_float32(tmp_path):
    model = small()
    params = values(model, dtype=ml_dtypes.bfloat16)
    assert {t.dtype for t in to_huggingface(model, params).values()} == {
        params["head.weight"].dtype
    }
    save(tmp_path, model, params)
    _, loaded = load(tmp_path)
    assert {leaf.dtype for leaf in loaded.values()} == {jnp.dtype("float32")}
    assert _equal(loaded, {k: v.astype(np.float32) for k, v in params.items()})


def test_to_huggingface_is_linear():
    model = small(qk_norm="full", attention_bias=True)
    x, y = values(model, seed=1), values(model, seed=2)
    mixed = to_huggingface(model, {name: 2 * x[name] - y[name] for name in x})
    tensors = to_huggingface(model, x), to_huggingface(model, y)
    assert _equal(mixed, {name: 2 * tensors[0][name] - tensors[1][name] for name in mixed})


def test_tensors_are_contiguous_as_their_writer_needs(tmp_path):
    model = small()
    tensors = to_huggingface(model, values(model))
    save_file(tensors, tmp_path / "model.safetensors")
    assert _equal(load_file(tmp_path / "model.safetensors"), tensors)


def test_a_tied_head_is_the_embedding():
    model = small(tie_embeddings=True)
    params = values(model)
    tensors = to_huggingface(model, params)
    assert "lm_head.weight" not in tensors
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert _equal(from_huggingface(model, copied), params)
    with pytest.raises(UserError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        from_huggingface(model, {**copied, "lm_head.weight": 2 * copied["lm_head.weight"]})


GATE = "model.layers.1.mlp.router.gate.weight"


def _broken(tensors, fault):
    if fault == "missing":
        del tensors[GATE]
    elif fault == "extra":
        tensors["model.layers.1.mlp.router.gate.bias"] = np.zeros(3, np.float32)
    elif fault == "shape":
        tensors[GATE] = tensors[GATE].T
    else:
        tensors[GATE] = tensors[GATE].astype(fault)
    return tensors


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", [f"missing: {GATE}; ", "asks for 132 arrays and 1 of them"]),
        ("extra", ["too much: model.layers.1.mlp.router.gate.bias; ", "132 arrays", "remove it"]),
        ("shape", [f"{GATE} has shape [8, 3]", "asks for [3, 8]"]),
        ("int8", [f"{GATE} is int8", "float32, bfloat16 or float16"]),
        ("float64", [f"{GATE} is float64", "float32, bfloat16 or float16"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, fault, words):
    model = small()
    save(tmp_path, model, values(model))
    tensors = _broken(to_huggingface(model, values(model)), fault)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    expected = [f"{tmp_path}: ", *words]
    assert [word for word in expected if word not in str(caught.value)] == []


def test_many_missing_tensors_are_counted():
    model = small()
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight, .* and 129 more; .*132 "):
        from_huggingface(model, {})
    assert len(tensor_shapes(model)) == 132


def test_nothing_is_written_for_a_model_that_does_not_fit(tmp_path):
    model = small(router=RouterConfig(bias_gamma=0.001))
    with pytest.raises(UserError, match=r"model\.router\.bias_gamma=0\.001"):
        save(tmp_path / "out", model, values(model))
    assert not (tmp_path / "out").exists()


def test_leaves_of_another_model_are_refused():
    params = values(small())
    with pytest.raises(UserError, match=r"leading\.0\.attention\.q has shape \[8, 4, 4\]"):
        to_huggingface(small(num_heads=2), params)
