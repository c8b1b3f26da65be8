"""Every parameter of the model, once: name, shape, logical dims, and how it is initialised.

Modules take what they create from here, specs are derived from the logical dims, the plan counts
the shapes, `interop` maps the names. A parameter that is not here cannot be created.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from olmo_jax.arch.layers import is_routed, layer_groups
from olmo_jax.config.records import ModelConfig

Init = Literal[
    "embedding",
    "attention_in",
    "attention_out",
    "router",
    "routed_in",
    "routed_out",
    "shared",
    "head",
    "ones",
    "zeros",
]

STACKED = "layers"
"""The logical dim of stacked layers, which is scanned."""

STAGED = ("chunks", "stages", STACKED)
"""What replaces it if a pipeline divides the layers: [chunks, ranks, a stage's layers]."""

DIMS = frozenset(
    {
        *("d_model", "heads", "kv_heads", "head_dim", "hidden", "experts", "router_experts"),
        *("vocab", STACKED),
    }
)
"""The logical dims that a description may name; a misspelt one would be divided by no axis."""


class Parameter(NamedTuple):
    """One leaf of the model; `dims` names each dim of `shape`.

    `init` and `fan_in` say how its first values are drawn, see `standard_deviation`. One that is
    not `trained` is state that a rule moves and no gradient does: the expert bias of a router.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init
    fan_in: int = 1
    trained: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stacked(self, sizes: tuple[int, ...], dims: tuple[str, ...]) -> "Parameter":
        """Return it with leading dims more."""
        return self._replace(shape=(*sizes, *self.shape), dims=(*dims, *self.dims))


Parameters = dict[str, Parameter]
"""By dotted name."""


def _gain(model: ModelConfig) -> Parameter:
    return Parameter((model.d_model,), ("d_model",), "ones")


def _projections(model: ModelConfig) -> Parameters:
    d, h = model.d_model, model.head_dim
    heads = {
        "q": (model.num_heads, "heads"),
        "k": (model.num_kv_heads, "kv_heads"),
        "v": (model.num_kv_heads, "kv_heads"),
    }
    parameters = {
        name: Parameter((d, number, h), ("d_model", dim, "head_dim"), "attention_in", fan_in=d)
        for name, (number, dim) in heads.items()
    }
    parameters["out"] = Parameter(
        (model.num_heads, h, d),
        ("heads", "head_dim", "d_model"),
        "attention_out",
        fan_in=model.num_heads * h,
    )
    if model.attention_bias:
        parameters |= {
            f"{name}_bias": Parameter((number, h), (dim, "head_dim"), "zeros")
            for name, (number, dim) in heads.items()
        }
        parameters["out_bias"] = Parameter((d,), ("d_model",), "zeros")
    return parameters


def _qk_norms(model: ModelConfig) -> Parameters:
    if model.qk_norm == "none":
        return {}
    if model.qk_norm == "head":
        gain = Parameter((model.head_dim,), ("head_dim",), "ones")
        return {"q_norm.gain": gain, "k_norm.gain": gain}
    heads, key_heads = (model.num_heads, model.head_dim), (model.num_kv_heads, model.head_dim)
    return {
        "q_norm.gain": Parameter(heads, ("heads", "head_dim"), "ones"),
        "k_norm.gain": Parameter(key_heads, ("kv_heads", "head_dim"), "ones"),
    }


def _attention(model: ModelConfig) -> Parameters:
    parameters = _projections(model) | _qk_norms(model)
    if model.attention_gate != "none":
        num_dims = 1 + (model.attention_gate == "elementwise")
        shape = (model.d_model, *(model.num_heads, model.head_dim)[:num_dims])
        dims = ("d_model", *("heads", "head_dim")[:num_dims])
        parameters["gate"] = Parameter(shape, dims, "attention_in", fan_in=model.d_model)
    if model.scalable_softmax:
        parameters["softmax_scale"] = Parameter((model.num_heads,), ("heads",), "ones")
    return parameters


def _mlp(
    model: ModelConfig, hidden: int, inner: Init = "shared", outer: Init = "shared"
) -> Parameters:
    d = model.d_model
    return {
        "up_gate": Parameter((d, 2 * hidden), ("d_model", "hidden"), inner, fan_in=d),
        "down": Parameter((hidden, d), ("hidden", "d_model"), outer, fan_in=hidden),
    }


def _router(model: ModelConfig) -> Parameters:
    # Not "experts": every rank routes, so no mesh axis divides them.
    experts, dims = (model.num_experts,), ("router_experts",)
    router = {
        "weight": Parameter(
            (*experts, model.d_model), (*dims, "d_model"), "router", fan_in=model.d_model
        )
    }
    if model.router.bias:
        router["bias"] = Parameter(experts, dims, "zeros")
    if has_expert_bias(model):
        router["score_bias"] = Parameter(experts, dims, "zeros", trained=False)
    return router


def has_expert_bias(model: ModelConfig) -> bool:
    """Say whether the routers have a bias that enters the choice of experts alone."""
    return model.router.bias_gamma is not None or model.router.score_correction_bias


def _under(prefix: str, parameters: Mapping[str, Parameter]) -> Parameters:
    return {f"{prefix}.{name}": leaf for name, leaf in parameters.items()}


def _stacked(parameters: Mapping[str, Parameter], number: int, dim: str) -> Parameters:
    return {name: leaf.stacked((number,), (dim,)) for name, leaf in parameters.items()}


def _moe(model: ModelConfig) -> Parameters:
    experts = _mlp(model, model.expert_hidden, "routed_in", "routed_out")
    parameters = _under("router", _router(model))
    parameters |= _under("experts", _stacked(experts, model.num_experts, "experts"))
    if model.shared_hidden:
        parameters |= _under("shared", _mlp(model, model.shared_hidden))
    return parameters


def _norms(model: ModelConfig) -> Parameters:
    sides = {"pre": ("input",), "reordered": ("output",), "peri": ("input", "output")}
    return {
        f"{branch}_{side}_norm.gain": _gain(model)
        for branch in ("attention", "mlp")
        for side in sides[model.norm]
    }


def block(model: ModelConfig, *, routed: bool) -> Parameters:
    """Return the leaves of one block, by their dotted names inside it."""
    feed_forward = (
        _under("moe", _moe(model)) if routed else _under("mlp", _mlp(model, model.dense_hidden))
    )
    return _under("attention", _attention(model)) | _norms(model) | feed_forward


def ends(model: ModelConfig) -> Parameters:
    """Return the leaves of the embedding and the head."""
    vocab, d = model.vocab_size, model.d_model
    parameters = {
        "embedding.weight": Parameter((vocab, d), ("vocab", "d_model"), "embedding"),
        "head.norm.gain": _gain(model),
    }
    if model.embedding_norm:
        parameters["embedding.norm.gain"] = _gain(model)
    if not model.tie_embeddings:
        parameters["head.weight"] = Parameter((d, vocab), ("d_model", "vocab"), "head")
    return parameters


@cache
def _leaves(model: ModelConfig) -> Parameters:
    groups = layer_groups(model)
    leaves = ends(model)
    for group, layers in (("leading", groups.leading), ("trailing", groups.trailing)):
        for index, layer in enumerate(layers):
            single = block(model, routed=is_routed(model, layer))
            leaves |= _under(f"{group}.{index}", single)
    if groups.body:
        body = block(model, routed=is_routed(model, groups.body[0]))
        leaves |= _under("body", _stacked(body, len(groups.body), STACKED))
    for name, leaf in leaves.items():
        _check_dims(name, leaf)
    return leaves


def _check_dims(name: str, leaf: Parameter) -> None:
    """Refuse a leaf whose dims do not name each dim of its shape.

    Raises: ValueError with the leaf's name.
    """
    if len(leaf.dims) != len(leaf.shape) or not DIMS.issuperset(leaf.dims):
        raise ValueError(
            f"the parameter {name} has the shape {leaf.shape} and the dims {leaf.dims}; each dim "
            f"of a shape has one name out of {', '.join(sorted(DIMS))}; see DIMS in "
            "olmo_jax/arch/parameters.py"
        )


def leaves(model: ModelConfig) -> Parameters:
    """Return every leaf of the model by name, the body's stacked; expert biases included."""
    return dict(_leaves(model))


def parameters(model: ModelConfig) -> Parameters:
    """Return the leaves that an optimizer trains: all but the routers' expert biases."""
    return {name: leaf for name, leaf in _leaves(model).items() if leaf.trained}


def expert_biases(model: ModelConfig) -> Parameters:
    """Return the leaves that the balance rule moves."""
    return {name: leaf for name, leaf in _leaves(model).items() if not leaf.trained}


def total_parameters(model: ModelConfig) -> int:
    """Return the number of parameters, expert biases left out."""
    return sum(leaf.size for leaf in parameters(model).values())


def active_parameters(model: ModelConfig) -> int:
    """Return how many parameters one token meets: of the experts, `top_k` a layer.

    The embedding counts in full, as in olmo_core 3.0.0.
    """
    # A leaf of experts has all of them along one dim, each with the same shape.
    return sum(
        leaf.size // model.num_experts * model.top_k if "experts" in leaf.dims else leaf.size
        for leaf in parameters(model).values()
    )


def standard_deviation(model: ModelConfig, init: Init, layer: int, fan_in: int) -> float:
    """Return the sigma of a leaf's initial values; `layer` counts from 0.

    Source: olmo_core 3.0.0, nn/transformer/init.py and OLMoDDPModel.init_weights.
    """
    std, method = model.init.std, model.init.method
    if init == "embedding":
        normal = model.init.embedding_std or std
        fan = 1.0 / model.embedding_multiplier
        return {"normal": normal, "llama": 1.0, "llama_depth": 1.0, "fan_in": fan}[method]
    if init == "head":
        return std if method == "normal" else model.d_model**-0.5
    if method == "fan_in":
        # The reference has no fan-in rule for the shared expert, and a dense block's MLP is one.
        return std if init == "shared" else fan_in**-0.5
    if init == "attention_in" or method == "normal":
        return std
    # Meant for what is added to the residual stream, two addends a layer: with `llama` the variance
    # of their sum does not depend on the depth, with `llama_depth` it grows as its logarithm. As in
    # the reference, the router and the inner products of MLPs have it too.
    return std / math.sqrt(2 * (model.num_layers if method == "llama" else layer + 1))
