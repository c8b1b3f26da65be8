"""The tensors of Olmo3MoeForCausalLM and the leaves here: the same numbers, arranged otherwise.

Theirs are [out, in], one a layer and expert; ours are [in, out], stacked, and a block's up and
gate projections are one matrix. Source: olmo_core 3.0.0, nn/hf/convert.py and nn/moe/v2/hf.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from olmo_jax.arch.layers import is_routed, layer_groups
from olmo_jax.arch.parameters import block, parameters
from olmo_jax.config.records import ModelConfig

Tensors = dict[str, np.ndarray]


class Piece(NamedTuple):
    """One leaf of one layer and its tensors; `split` and `join` are inverse and linear."""

    names: tuple[str, ...]
    split: Callable[[np.ndarray], list[np.ndarray]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]


class LeafGroup(NamedTuple):
    """Where a unit's leaves stand: their prefix here and there, and their row in a stacked leaf."""

    ours: str
    theirs: str
    row: int | None
    pieces: dict[str, Piece]


_MATRICES = {
    "attention.q": ("self_attn.q_proj",),
    "attention.k": ("self_attn.k_proj",),
    "attention.v": ("self_attn.v_proj",),
    "attention.out": ("self_attn.o_proj",),
    "attention.gate": ("self_attn.g_proj",),
    "mlp.up_gate": ("mlp.up_proj", "mlp.gate_proj"),
    "mlp.down": ("mlp.down_proj",),
    "moe.shared.up_gate": ("mlp.shared_expert.up_proj", "mlp.shared_expert.gate_proj"),
    "moe.shared.down": ("mlp.shared_expert.down_proj",),
    "head.weight": ("lm_head",),
}

_EXPERTS = {
    "moe.experts.up_gate": ("up_proj", "gate_proj"),
    "moe.experts.down": ("down_proj",),
}

_UNCHANGED = {
    "attention.q_bias": "self_attn.q_proj.bias",
    "attention.k_bias": "self_attn.k_proj.bias",
    "attention.v_bias": "self_attn.v_proj.bias",
    "attention.out_bias": "self_attn.o_proj.bias",
    "attention.q_norm.gain": "self_attn.q_norm.weight",
    "attention.k_norm.gain": "self_attn.k_norm.weight",
    "attention.softmax_scale": "self_attn.ssmax_scale",
    "attention_input_norm.gain": "pre_attention_layernorm.weight",
    "attention_output_norm.gain": "post_attention_layernorm.weight",
    "mlp_input_norm.gain": "pre_feedforward_layernorm.weight",
    "mlp_output_norm.gain": "post_feedforward_layernorm.weight",
    "moe.router.weight": "mlp.router.gate.weight",
    "embedding.weight": "model.embed_tokens.weight",
    "embedding.norm.gain": "model.embed_norm.weight",
    "head.norm.gain": "model.norm.weight",
}


def _unchanged(name: str, shape: tuple[int, ...], *, flat: bool) -> Piece:
    """Return the piece of a leaf that is the same there, up to a flattening."""
    theirs = (-1,) if flat else shape
    return Piece((name,), lambda x: [x.reshape(theirs)], lambda parts: parts[0].reshape(shape))


def _matrix(names: Sequence[str], shape: tuple[int, ...], num_inputs: int) -> Piece:
    """Return the piece of [in, out], whose transpose is `names` on top of each other."""
    width = math.prod(shape[:num_inputs])
    return Piece(
        tuple(f"{name}.weight" for name in names),
        lambda x: np.split(x.reshape(width, -1).T, len(names)),
        lambda parts: np.concatenate(parts).T.reshape(shape),
    )


def _experts(names: Sequence[str], shape: tuple[int, ...]) -> Piece:
    """Return the piece of [experts, in, out]: the tensors of expert 0, then those of 1, ..."""
    each = [
        _matrix([f"mlp.experts.{e}.{name}" for name in names], shape[1:], 1)
        for e in range(shape[0])
    ]
    num = len(names)
    return Piece(
        tuple(name for piece in each for name in piece.names),
        lambda x: [part for piece, w in zip(each, x, strict=True) for part in piece.split(w)],
        lambda parts: np.stack(
            [piece.join(parts[i * num : (i + 1) * num]) for i, piece in enumerate(each)]
        ),
    )


def _piece(model: ModelConfig, leaf: str, shape: tuple[int, ...]) -> Piece:
    if leaf in _EXPERTS:
        return _experts(_EXPERTS[leaf], shape)
    if leaf in _MATRICES:
        return _matrix(_MATRICES[leaf], shape, 2 if leaf == "attention.out" else 1)
    if leaf not in _UNCHANGED:
        raise ValueError(
            f"no rule says what the leaf {leaf} is in a Hugging Face folder; write one in "
            "olmo_jax/interop/weights.py, or refuse its option in olmo_jax/interop/expressible.py"
        )
    full_norm = model.qk_norm == "full" and leaf.endswith(("q_norm.gain", "k_norm.gain"))
    return _unchanged(_UNCHANGED[leaf], shape, flat=full_norm or leaf.endswith("_bias"))


def _ends(model: ModelConfig) -> LeafGroup:
    pieces = {
        leaf: _piece(model, leaf, shape.shape)
        for leaf, shape in parameters(model).items()
        if leaf.startswith(("embedding.", "head."))
    }
    return LeafGroup("", "", None, pieces)


def _leaf_groups(model: ModelConfig) -> Iterator[LeafGroup]:
    """Yield the ends, then the layers in order."""
    yield _ends(model)
    groups = layer_groups(model)
    for group, layers in zip(
        ("leading", "body", "trailing"), (groups.leading, groups.body, groups.trailing), strict=True
    ):
        for index, layer in enumerate(layers):
            shapes = block(model, routed=is_routed(model, layer))
            pieces = {leaf: _piece(model, leaf, shape.shape) for leaf, shape in shapes.items()}
            theirs = f"model.layers.{layer}."
            if group == "body":
                yield LeafGroup("body.", theirs, index, pieces)
            else:
                yield LeafGroup(f"{group}.{index}.", theirs, None, pieces)


def separate(model: ModelConfig, leaves: Mapping[str, np.ndarray]) -> Tensors:
    """Return their tensors as views of our leaves, as far as a view will do."""
    tensors: Tensors = {}
    for ours, theirs, row, pieces in _leaf_groups(model):
        for leaf, piece in pieces.items():
            value = leaves[ours + leaf]
            parts = piece.split(value if row is None else value[row])
            tensors |= {theirs + name: part for name, part in zip(piece.names, parts, strict=True)}
    return tensors


def combine(model: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return our leaves, the body's stacked in layer order."""
    leaves: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for ours, theirs, row, pieces in _leaf_groups(model):
        for leaf, piece in pieces.items():
            value = piece.join([tensors[theirs + name] for name in piece.names])
            if row is None:
                leaves[ours + leaf] = value
            else:
                stacks.setdefault(ours + leaf, []).append(value)
    return leaves | {name: np.stack(layers) for name, layers in stacks.items()}


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each of their tensors; nothing is allocated."""
    zero = np.zeros((), np.float32)
    leaves = {name: np.broadcast_to(zero, leaf.shape) for name, leaf in parameters(model).items()}
    return {name: tensor.shape for name, tensor in separate(model, leaves).items()}
