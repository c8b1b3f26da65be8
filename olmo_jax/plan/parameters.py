"""Names, shapes and logical dims of all parameters, and their number: from the config alone."""

import math
from typing import NamedTuple

from olmo_jax.config.layers import is_routed, layer_plan
from olmo_jax.config.records import ModelConfig


class ParameterShape(NamedTuple):
    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Shapes = dict[str, ParameterShape]


def _gain(model: ModelConfig) -> ParameterShape:
    return ParameterShape((model.d_model,), ("d_model",))


def _projections(model: ModelConfig) -> Shapes:
    d, h = model.d_model, model.head_dim
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    dims = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    shapes = {
        name: ParameterShape((d, count, h), ("d_model", dims[name], "head_dim"))
        for name, count in heads.items()
    }
    shapes["out"] = ParameterShape((model.num_heads, h, d), ("heads", "head_dim", "d_model"))
    if model.attention_bias:
        biases = {
            f"{name}_bias": ParameterShape((count, h), (dims[name], "head_dim"))
            for name, count in heads.items()
        }
        shapes |= biases | {"out_bias": _gain(model)}
    return shapes


def _qk_norms(model: ModelConfig) -> Shapes:
    if model.qk_norm == "none":
        return {}
    if model.qk_norm == "head":
        gain = ParameterShape((model.head_dim,), ("head_dim",))
        return {"q_norm.gain": gain, "k_norm.gain": gain}
    return {
        "q_norm.gain": ParameterShape((model.num_heads, model.head_dim), ("heads", "head_dim")),
        "k_norm.gain": ParameterShape(
            (model.num_kv_heads, model.head_dim), ("kv_heads", "head_dim")
        ),
    }


def _attention(model: ModelConfig) -> Shapes:
    shapes = _projections(model) | _qk_norms(model)
    if model.attention_gate != "none":
        width = 1 + (model.attention_gate == "elementwise")
        gate = (model.num_heads, model.head_dim)[:width]
        shapes["gate"] = ParameterShape(
            (model.d_model, *gate), ("d_model", *("heads", "head_dim")[:width])
        )
    if model.scalable_softmax:
        shapes["softmax_scale"] = ParameterShape((model.num_heads,), ("heads",))
    return shapes


def _mlp(model: ModelConfig, hidden: int) -> Shapes:
    return {
        "up_gate": ParameterShape((model.d_model, 2 * hidden), ("d_model", "hidden")),
        "down": ParameterShape((hidden, model.d_model), ("hidden", "d_model")),
    }


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _stacked(shapes: Shapes, num: int, dim: str) -> Shapes:
    return {
        name: ParameterShape((num, *leaf.shape), (dim, *leaf.dims)) for name, leaf in shapes.items()
    }


def _routed(model: ModelConfig) -> Shapes:
    dims = ("router_experts", "d_model")
    router = {"weight": ParameterShape((model.num_experts, model.d_model), dims)}
    if model.router.bias:
        router["bias"] = ParameterShape((model.num_experts,), dims[:1])
    experts = _stacked(_mlp(model, model.expert_hidden), model.num_experts, "experts")
    shared = _mlp(model, model.shared_hidden) if model.shared_hidden else {}
    parts = {"router": router, "experts": experts, "shared": shared}
    return {k: v for name, part in parts.items() for k, v in _under(f"moe.{name}", part).items()}


def _norms(model: ModelConfig) -> Shapes:
    places = {"pre": ("input",), "reordered": ("output",), "peri": ("input", "output")}
    return {
        f"{branch}_{place}_norm.gain": _gain(model)
        for branch in ("attention", "mlp")
        for place in places[model.norm]
    }


def block_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Return the parameters of one block, by their dotted names inside it."""
    feed_forward = (
        _routed(model)
        if is_routed(model, layer)
        else _under("mlp", _mlp(model, model.dense_hidden))
    )
    return _under("attention", _attention(model)) | _norms(model) | feed_forward


def _ends(model: ModelConfig) -> Shapes:
    shapes = {
        "embedding.weight": ParameterShape((model.vocab_size, model.d_model), ("vocab", "d_model")),
        "head.norm.gain": _gain(model),
    }
    if model.embedding_norm:
        shapes["embedding.norm.gain"] = _gain(model)
    if not model.tie_embeddings:
        shapes["head.weight"] = ParameterShape(
            (model.d_model, model.vocab_size), ("d_model", "vocab")
        )
    return shapes


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return shape and logical dims of every parameter by name, body leaves stacked.

    The router's `score_bias` is not among them: it is state that a rule moves and no gradient does.
    """
    plan = layer_plan(model)
    shapes = _ends(model)
    for group, layers in (("leading", plan.leading), ("trailing", plan.trailing)):
        for index, layer in enumerate(layers):
            shapes |= _under(f"{group}.{index}", block_shapes(model, layer))
    if plan.body:
        body = _stacked(block_shapes(model, plan.body[0]), len(plan.body), "layers")
        shapes |= _under("body", body)
    return shapes


def total_parameters(model: ModelConfig) -> int:
    """Return the number of parameters, `score_bias` (see `parameter_shapes`) left out."""
    return sum(leaf.size for leaf in parameter_shapes(model).values())


def active_parameters(model: ModelConfig) -> int:
    """Return how many parameters one token meets: of the experts, `top_k` a layer.

    The embedding counts in full, as in olmo_core 3.0.0.
    """
    return sum(
        leaf.size // model.num_experts * model.top_k if "experts" in name.split(".") else leaf.size
        for name, leaf in parameter_shapes(model).items()
    )
