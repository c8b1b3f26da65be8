"""Every named activation, once: what it is, where in the model, its shape on one device.

The modules name the result of every product, attention, transfer and choice by these names. Which
of them the forward pass saves for the backward pass follows from `train.recompute`; what it does
not save, the backward pass rematerializes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from olmo_jax.arch.sizes import ITEM_BYTES, PIECES, Context, block_size, head_copies, pieces
from olmo_jax.config.records import Config, ModelConfig

Part = Literal["embedding", "attention", "mlp", "shared", "router", "experts", "head"]


class Named(NamedTuple):
    """A name's part of the model, and what it stands for."""

    part: Part
    words: str


NAMES: Mapping[str, Named] = {
    "embedding": Named("embedding", "the rows of the embedding, before their scale and norm"),
    "query": Named("attention", "the query projection, before bias, norm and rotation"),
    "key": Named("attention", "the key projection"),
    "value": Named("attention", "the value projection"),
    "attention_gate": Named("attention", "the logits of the attention's gate"),
    "exchanged_query": Named("attention", "Ulysses: queries of whole rows, of this rank's heads"),
    "exchanged_key_value": Named("attention", "Ulysses: their keys and values"),
    "attention": Named("attention", "what each head attended to"),
    "attention_logsumexp": Named("attention", "the softmax's normaliser of each query"),
    "exchanged_attention": Named(
        "attention", "Ulysses: what all heads attended to, of this rank's positions"
    ),
    "attention_output": Named("attention", "the attention's output projection"),
    "mlp_hidden": Named("mlp", "up and gate of a dense block's MLP"),
    "mlp_output": Named("mlp", "its output"),
    "shared_hidden": Named("shared", "up and gate of the shared expert"),
    "shared_output": Named("shared", "its output"),
    "router_logits": Named("router", "the router's logits, FP32"),
    "balance_counts": Named("router", "the counts that the balance loss multiplies"),
    "route_plan": Named("experts", "which row goes where"),
    "expert_rows": Named("experts", "rows as they arrived at the experts"),
    "expert_hidden": Named("experts", "up and gate of the routed experts"),
    "expert_output": Named("experts", "what the routed experts return"),
    "combined": Named("experts", "each token's weighted sum of its rows"),
    "head_normaliser": Named("head", "the log-sum-exp of each token's logits"),
}
"""The activations that can be rematerialized."""

ALWAYS_SAVED = ("router_choice", "router_weights")
"""The experts of each token and how much each counts. XLA may round a value otherwise where it is
rematerialized, and another rounding could be another expert: both passes must see one routing.
"""

GATHERED = "gathered_weight"
"""A weight as FSDP gathered it, in the compute dtype."""

_OUTSIDE_BLOCKS = ("embedding", "head")

POLICIES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "block": tuple(name for name, (part, _) in NAMES.items() if part not in _OUTSIDE_BLOCKS),
    "attention": tuple(
        name
        for name, (part, _) in NAMES.items()
        if part == "attention" and name != "attention_output"
    ),
    "experts": ("expert_hidden", "expert_output"),
}
"""Per value of `train.recompute`, the names that are rematerialized."""

_READ_BY_A_NORM = frozenset({"mlp_output", "shared_output", "combined"})
"""The last activations of a block: without a norm after them nothing reads them again."""


def present_names(config: Config) -> frozenset[str]:
    """Return the names that an activation of this model has."""
    model = config.model
    routed, exchanges = model.num_routed_layers > 0, config.mesh.sequence != 1  # -1: open
    parts = {
        "mlp": model.num_dense_layers > 0,
        "shared": routed and model.shared_hidden > 0,
        "router": routed,
        "experts": routed,
    }
    absent = {name for name, (part, _) in NAMES.items() if not parts.get(part, True)}
    if model.attention_gate == "none":
        absent.add("attention_gate")
    if not exchanges or config.parallel.context != "ulysses":
        absent |= {name for name in NAMES if name.startswith("exchanged")}
    return frozenset(NAMES) - absent


def rematerialized_names(config: Config) -> frozenset[str]:
    """Return the names that the backward pass rematerializes."""
    policy = config.train.recompute
    return frozenset(POLICIES[policy] if isinstance(policy, str) else policy)


def saved_names(config: Config) -> frozenset[str]:
    """Return the names that the forward pass saves for the backward pass."""
    names = frozenset(NAMES) - rematerialized_names(config) | {*ALWAYS_SAVED}
    parallel = config.parallel
    held = parallel.method == "fsdp" and parallel.reshard == "after_backward"
    return names | {GATHERED} if held else names


class Activation(NamedTuple):
    """An array that one device makes of one microbatch; `name` is one of `NAMES` or
    `ALWAYS_SAVED`, or plain words.

    `every_layer`: each layer has its own; else those of a scan share it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    every_layer: bool = True

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class DeviceSizes(NamedTuple):
    """What the shapes depend on beside the model: one device's share of a microbatch.

    `rows` of `positions` each; `sequence_ranks` share a row by `context`; `expert_ranks` share the
    experts, of which each receives `received_rows`.
    """

    rows: int
    positions: int
    sequence_ranks: int
    context: Context
    expert_ranks: int
    received_rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.positions


def _normaliser(
    positions: int, device: DeviceSizes, heads: int, key_heads: int, *, parts: int
) -> Activation:
    """Return the softmax's normaliser of `positions`, in `parts` of whole blocks each.

    The query heads of one key head are rows of a block.
    """
    # As `ops.blockwise` has it: the last block is padded, and its padding has a normaliser too.
    size, number = pieces(positions // parts, block_size(positions // parts))
    shape = (parts * number, device.rows, key_heads, size * heads // key_heads)
    return Activation("attention_logsumexp", "float32", shape)


def _attended(model: ModelConfig, device: DeviceSizes) -> Iterator[Activation]:
    """Yield what attention itself makes, by the way in which it sees other ranks' positions."""
    ranks, length = device.sequence_ranks, device.positions
    heads, key_heads = model.num_heads, model.num_kv_heads
    local = (device.rows, length, heads, model.head_dim)
    if ranks == 1 or device.context == "ring":
        parts = 1 if ranks == 1 else PIECES["ring"]
        yield Activation("attention", model.dtype, local)
        yield _normaliser(length, device, heads, key_heads, parts=parts)
        return
    heads, key_heads = heads // ranks, key_heads * head_copies(key_heads, ranks) // ranks
    whole = (device.rows, ranks * length, heads, model.head_dim)
    pair = (2, device.rows, ranks * length, key_heads, model.head_dim)
    yield Activation("exchanged_query", model.dtype, whole)
    yield Activation("exchanged_key_value", model.dtype, pair)
    yield Activation("attention", model.dtype, whole)
    yield _normaliser(ranks * length, device, heads, key_heads, parts=1)
    yield Activation("exchanged_attention", model.dtype, local)


def _is_read(model: ModelConfig, device: DeviceSizes, saved: frozenset[str], name: str) -> bool:
    """Say whether backward reads a projection: where Ulysses saves what was exchanged, it may not.

    Norms, clipping and scales read their input; biases and rotations do not.
    """
    #     projection -> bias, norm, clip, rotation, scale -> exchange -> attention
    #
    # Attention reads what was exchanged. If that is saved, only a step before it whose gradient
    # needs its input still reads the projection.
    exchanged = "exchanged_query" if name == "query" else "exchanged_key_value"
    if device.sequence_ranks == 1 or device.context == "ring" or exchanged not in saved:
        return True
    by_norm = name != "value" and model.qk_norm != "none"
    return by_norm or model.clip_qkv is not None or (name == "query" and model.scalable_softmax)


def _attention(
    model: ModelConfig, device: DeviceSizes, saved: frozenset[str]
) -> Iterator[Activation]:
    tokens = (device.rows, device.positions)
    heads, key_heads = (model.num_heads, model.head_dim), (model.num_kv_heads, model.head_dim)
    for name, width in {"query": heads, "key": key_heads, "value": key_heads}.items():
        if _is_read(model, device, saved, name):
            yield Activation(name, model.dtype, (*tokens, *width))
    yield from _attended(model, device)
    if model.attention_gate != "none":
        gate = heads if model.attention_gate == "elementwise" else heads[:1]
        yield Activation("attention_gate", model.dtype, (*tokens, *gate))
    yield Activation("attention_output", model.dtype, (*tokens, model.d_model))


def _mlp(model: ModelConfig, device: DeviceSizes, part: str, hidden: int) -> Iterator[Activation]:
    tokens = (device.rows, device.positions)
    yield Activation(f"{part}_hidden", model.dtype, (*tokens, 2 * hidden))
    yield Activation(f"{part}_output", model.dtype, (*tokens, model.d_model))


def _router(model: ModelConfig, device: DeviceSizes) -> Iterator[Activation]:
    tokens = (device.rows, device.positions)
    rows = device.rows if model.router.balance_scope == "instance" else 1
    every_layer = model.router.assignment != "uniform"
    yield Activation("router_logits", "float32", (*tokens, model.num_experts))
    yield Activation("router_choice", "int32", (*tokens, model.top_k), every_layer)
    yield Activation("router_weights", "float32", (*tokens, model.top_k))
    yield Activation("balance_counts", "int32", (rows, model.num_experts), every_layer)
    yield Activation("balance_counts", "int32", (rows,), every_layer=False)


def _experts(model: ModelConfig, device: DeviceSizes) -> Iterator[Activation]:
    ranks, rows, every_layer = (
        device.expert_ranks,
        device.received_rows,
        model.router.assignment != "uniform",
    )
    group_tokens = (ranks * device.tokens, model.top_k)
    for shape in (group_tokens, (rows,), (model.num_experts // ranks,), ()):
        yield Activation("route_plan", "int32", shape, every_layer)
    yield Activation("expert_rows", model.dtype, (rows, model.d_model))
    yield Activation("expert_hidden", model.dtype, (rows, 2 * model.expert_hidden))
    yield Activation("expert_output", model.dtype, (rows, model.d_model))
    yield Activation("combined", model.dtype, (device.tokens, model.d_model))


def block_activations(
    model: ModelConfig, device: DeviceSizes, saved: frozenset[str], *, routed: bool
) -> Iterator[Activation]:
    """Yield every named activation of one block that backward may read; `saved` says what it has.

    Tests hold the shapes to what autodiff keeps.
    """
    yield from _attention(model, device, saved)
    if not routed:
        yield from _mlp(model, device, "mlp", model.dense_hidden)
        return
    yield from _router(model, device)
    yield from _experts(model, device)
    if model.shared_hidden:
        yield from _mlp(model, device, "shared", model.shared_hidden)


def block_residuals(
    model: ModelConfig, device: DeviceSizes, saved: frozenset[str], *, routed: bool
) -> list[Activation]:
    """Return what one block saves of a microbatch: its input, and its activations in `saved`."""
    names = saved - (_READ_BY_A_NORM if model.norm == "pre" else frozenset())
    block_input = (device.rows, device.positions, model.d_model)
    return [
        Activation("block input", model.dtype, block_input),
        *(
            activation
            for activation in block_activations(model, device, saved, routed=routed)
            if activation.name in names
        ),
    ]
