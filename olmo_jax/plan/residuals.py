"""What a block keeps for its backward pass, by name and shape, and what a pipeline's slots hold.

No jax. Tests hold the shapes to what autodiff keeps.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from olmo_jax.config.layers import body_grid, is_routed
from olmo_jax.config.mesh_rules import PIECES
from olmo_jax.config.records import Config
from olmo_jax.config.residuals import kept
from olmo_jax.mesh.axes import num_expert_ranks
from olmo_jax.plan.passes import microbatch_tokens, passes, row_positions
from olmo_jax.plan.static_sizes import (
    ITEM_BYTES,
    block_size,
    capacity,
    head_copies,
    num_microbatches,
    pieces,
    received_rows,
)

Sizes = Mapping[str, int]

READ_BY_A_NORM = frozenset({"mlp_output", "shared_output", "combined"})
"""The last results of a block: without a norm after them nothing reads them again."""


class Residual(NamedTuple):
    """An array that is kept of one microbatch. `name` is of `config.residuals`, or plain words.

    `every_layer`: each layer has its own; else those of a scan share it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    every_layer: bool = True

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def _normaliser(shared: int, batch: int, heads: int, key_heads: int, *, cut: int) -> Residual:
    """Return the softmax's normaliser of `shared` positions, cut into pieces of whole blocks.

    The query heads of one key head are rows of a block.
    """
    size, number = pieces(shared // cut, block_size(shared // cut))
    shape = (cut * number, batch, key_heads, size * heads // key_heads)
    return Residual("attention_logsumexp", "float32", shape)


def _attended(config: Config, sizes: Sizes) -> Iterator[Residual]:
    """Yield the results of attention itself, by the way in which it sees other ranks' positions."""
    model, ranks, batch = config.model, sizes["sequence"], config.train.microbatch
    length, heads, key_heads = row_positions(config, sizes), model.num_heads, model.num_kv_heads
    local = (batch, length, heads, model.head_dim)
    if ranks == 1 or config.parallel.context == "ring":
        cut = 1 if ranks == 1 else PIECES["ring"]
        yield Residual("attention", model.dtype, local)
        yield _normaliser(length, batch, heads, key_heads, cut=cut)
        return
    heads, key_heads = heads // ranks, key_heads * head_copies(key_heads, ranks) // ranks
    whole = (batch, ranks * length, heads, model.head_dim)
    pair = (2, batch, ranks * length, key_heads, model.head_dim)
    yield Residual("exchanged_query", model.dtype, whole)
    yield Residual("exchanged_key_value", model.dtype, pair)
    yield Residual("attention", model.dtype, whole)
    yield _normaliser(ranks * length, batch, heads, key_heads, cut=1)
    yield Residual("exchanged_attention", model.dtype, local)


def _is_read(config: Config, sizes: Sizes, name: str) -> bool:
    """Say whether backward reads a projection: where Ulysses keeps what was exchanged, it may not.

    Norms, clipping and scales read their input; biases and rotations do not.
    """
    model = config.model
    exchanged = "exchanged_query" if name == "query" else "exchanged_key_value"
    if sizes["sequence"] == 1 or config.parallel.context == "ring" or exchanged not in kept(config):
        return True
    by_norm = name != "value" and model.qk_norm != "none"
    return by_norm or model.clip_qkv is not None or (name == "query" and model.scalable_softmax)


def _attention(config: Config, sizes: Sizes) -> Iterator[Residual]:
    model, batch, length = config.model, config.train.microbatch, row_positions(config, sizes)
    heads, key_heads = (model.num_heads, model.head_dim), (model.num_kv_heads, model.head_dim)
    for name, width in {"query": heads, "key": key_heads, "value": key_heads}.items():
        if _is_read(config, sizes, name):
            yield Residual(name, model.dtype, (batch, length, *width))
    yield from _attended(config, sizes)
    if model.attention_gate != "none":
        gate = heads if model.attention_gate == "elementwise" else heads[:1]
        yield Residual("attention_gate", model.dtype, (batch, length, *gate))
    yield Residual("attention_output", model.dtype, (batch, length, model.d_model))


def _mlp(config: Config, sizes: Sizes, name: str, hidden: int) -> Iterator[Residual]:
    model, train = config.model, config.train
    tokens = (train.microbatch, row_positions(config, sizes))
    yield Residual(f"{name}_hidden", model.dtype, (*tokens, 2 * hidden))
    yield Residual(f"{name}_output", model.dtype, (*tokens, model.d_model))


def _router(config: Config, sizes: Sizes) -> Iterator[Residual]:
    model, train = config.model, config.train
    tokens = (train.microbatch, row_positions(config, sizes))
    rows = train.microbatch if model.router.balance_scope == "instance" else 1
    anew = model.router.assignment != "uniform"
    yield Residual("router_logits", "float32", (*tokens, model.num_experts))
    yield Residual("router_choice", "int32", (*tokens, model.top_k), anew)
    yield Residual("router_weights", "float32", (*tokens, model.top_k))
    yield Residual("balance_counts", "int32", (rows, model.num_experts), anew)
    yield Residual("balance_counts", "int32", (rows,), every_layer=False)


def _experts(config: Config, sizes: Sizes) -> Iterator[Residual]:
    model = config.model
    ranks = num_expert_ranks(sizes, fold_sequence=config.parallel.fold_sequence)
    tokens, anew = microbatch_tokens(config, sizes), model.router.assignment != "uniform"
    limit = capacity(config.parallel.capacity_factor, tokens, model.top_k)
    rows = received_rows(tokens, model.top_k, ranks, limit)
    for shape in ((ranks * tokens, model.top_k), (rows,), (model.num_experts // ranks,), ()):
        yield Residual("route_plan", "int32", shape, anew)
    yield Residual("expert_rows", model.dtype, (rows, model.d_model))
    yield Residual("expert_hidden", model.dtype, (rows, 2 * model.expert_hidden))
    yield Residual("expert_output", model.dtype, (rows, model.d_model))
    yield Residual("combined", model.dtype, (tokens, model.d_model))


def block_results(config: Config, sizes: Sizes, *, routed: bool) -> Iterator[Residual]:
    """Yield every named result of one block that its backward pass may keep."""
    model = config.model
    yield from _attention(config, sizes)
    if not routed:
        yield from _mlp(config, sizes, "mlp", model.dense_hidden)
        return
    yield from _router(config, sizes)
    yield from _experts(config, sizes)
    if model.shared_hidden:
        yield from _mlp(config, sizes, "shared", model.shared_hidden)


def block_residuals(config: Config, sizes: Sizes, *, routed: bool) -> list[Residual]:
    """Return what one block keeps of a microbatch: its input, and what `train.recompute` leaves."""
    model, train = config.model, config.train
    names = kept(config) - (READ_BY_A_NORM if model.norm == "pre" else frozenset())
    tokens = (train.microbatch, row_positions(config, sizes))
    results = block_results(config, sizes, routed=routed)
    own = [Residual("block input", model.dtype, (*tokens, model.d_model))]
    return own + [result for result in results if result.name in names]


def stage_residuals(config: Config, sizes: Sizes) -> list[Residual]:
    """Return what one chunk keeps of a microbatch: a leading dim has the repeats of the windows."""
    run, chunks = passes(config, sizes), config.parallel.pipeline_chunks
    repeats = len(run.body) // run.plan.period
    block = block_residuals(config, sizes, routed=is_routed(config.model, run.body[0]))
    if body_grid(config.model, sizes["pipeline"], chunks).waste:
        block.append(Residual("is no empty place", "bool", ()))
    if config.model.router.jitter_eps is not None:
        block.append(Residual("layer number", "int32", ()))
    one = [
        each._replace(shape=(repeats, *each.shape)) if each.every_layer else each for each in block
    ]
    return one * run.plan.period


def peak_live(config: Config, sizes: Sizes, rank: int) -> int:
    """Return the most chunk activations that a rank of the pipeline ever holds."""
    chunks = config.parallel.pipeline_chunks
    all_of_them = chunks * num_microbatches(config.train, sizes)
    if config.parallel.pipeline_schedule == "gpipe":
        return all_of_them
    return min(all_of_them, (chunks + 1) * sizes["pipeline"] - 1 - 2 * rank)


def num_slots(config: Config, sizes: Sizes) -> int:
    """Return how many chunk activations every rank has room for: one program runs on all.

    One more than rank 0 holds if a rank idles in a forward while all that it ever holds is alive:
    in GPipe, and in 1F1B of P microbatches.
    """
    chunks = config.parallel.pipeline_chunks
    most = chunks * num_microbatches(config.train, sizes) + 1
    if config.parallel.pipeline_schedule == "gpipe":
        return most
    return min(most, (chunks + 1) * sizes["pipeline"] - 1)


def slot_bytes(config: Config, sizes: Sizes) -> int:
    """Return the bytes of all slots of one rank."""
    return num_slots(config, sizes) * sum(each.num_bytes for each in stage_residuals(config, sizes))
