"""Floating-point operations of a training step, from the config alone.

The convention: a product of [m, k] and [k, n] is `2 m k n`, its backward pass twice that; nothing
but matrix products counts (no norm, softmax, rotation or bias). *Useful* FLOPs are those that a
model needs and no more: attention over the pairs that causality and the window allow in an unbroken
sequence (packing does not make it cheaper), `top_k` experts a token, no lookup in the embedding,
nothing for recomputation, padding, dropped or masked tokens. *Executed* FLOPs are those of every
product in the program of a step, needed or not.

Source: olmo_core 3.0.0, OLMoDDPModel.num_flops_per_token.
Differs: there the gains and biases of attention and the final norm count as 6 each.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from olmo_jax.config.layers import is_routed, window_of
from olmo_jax.config.mesh_rules import PIECES
from olmo_jax.config.records import Config, ModelConfig
from olmo_jax.config.residuals import recomputed
from olmo_jax.mesh.axes import num_expert_ranks
from olmo_jax.plan.passes import microbatch_tokens, passes, row_positions
from olmo_jax.plan.static_sizes import (
    CPU_TILE,
    EMBEDDING_TILE,
    block_size,
    capacity,
    num_microbatches,
    pieces,
    received_rows,
    ring_hops,
    visited_rows,
)


@dataclass(frozen=True)
class Flops:
    forward: int = 0
    backward: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.forward * times, self.backward * times)

    def __floordiv__(self, parts: int) -> "Flops":
        return Flops(self.forward // parts, self.backward // parts)

    @property
    def total(self) -> int:
        return self.forward + self.backward


def matmul(m: int, k: int, n: int) -> Flops:
    """Return the FLOPs of [m, k] times [k, n], and of the gradients of both factors."""
    return Flops(2 * m * k * n, 4 * m * k * n)


def attended_pairs(length: int, window: int | None) -> int:
    """Return a sequence's (query, key) pairs: causal, the last `window` keys if given."""
    width = length if window is None else min(window, length)
    return width * (width + 1) // 2 + (length - width) * width


def block_pairs_count(length: int, window: int | None) -> int:
    """Return how many pairs `block_pairs` lists, without listing them."""
    block = block_size(length)
    reach = None if window is None else math.ceil((window - 1) / block) + 1
    return attended_pairs(math.ceil(length / block), reach)


def attention_projections(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of one layer's query, key, value, gate and output products."""
    gate = {"none": 0, "headwise": 1, "elementwise": model.head_dim}[model.attention_gate]
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    width = heads * model.head_dim + model.num_heads * gate
    return matmul(tokens, model.d_model, width)


def attention_scores(model: ModelConfig, pairs: int) -> Flops:
    """Return the FLOPs of one layer's scores, `pairs` of all heads, and of those times values."""
    one = matmul(pairs, model.head_dim, 1)
    return one + one


def router(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of one layer's router logits."""
    return matmul(tokens, model.d_model, model.num_experts)


def mlp(model: ModelConfig, hidden: int, rows: int) -> Flops:
    """Return the FLOPs of `rows` rows through one gated MLP: up, gate and down."""
    return matmul(rows, model.d_model, 3 * hidden)


def head(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of the logits."""
    return matmul(tokens, model.d_model, model.vocab_size)


def _layer(
    model: ModelConfig, layer: int, tokens: int, pairs: Callable[[int | None], int], rows: int
) -> dict[str, Flops]:
    attention = {
        "attention_projections": attention_projections(model, tokens),
        "attention_scores": attention_scores(model, pairs(window_of(model, layer))),
    }
    if not is_routed(model, layer):
        return attention | {"dense_mlp": mlp(model, model.dense_hidden, tokens)}
    return attention | {
        "router": router(model, tokens),
        "routed_experts": mlp(model, model.expert_hidden, rows),
        "shared_expert": mlp(model, model.shared_hidden, tokens),
    }


def _of_layers(
    model: ModelConfig,
    runs: Iterable[tuple[int, int]],
    *,
    tokens: int,
    pairs: Callable[[int | None], int],
    rows: int,
) -> dict[str, Flops]:
    """Return the FLOPs of the layers of `runs`, each as often as it says, by kind of product."""
    sums: dict[str, Flops] = {}
    for layer, times in runs:
        for kind, part in _layer(model, layer, tokens, pairs, rows).items():
            sums[kind] = sums.get(kind, Flops()) + part * times
    return sums


def components(
    model: ModelConfig, *, tokens: int, pairs: Callable[[int | None], int], rows: int
) -> dict[str, Flops]:
    """Return the FLOPs of each kind of product, summed over the layers.

    `pairs(window)` are the (head, query, key) that a layer with this window computes for all its
    `tokens`, `rows` the rows that pass a layer's routed experts: with the useful numbers this is
    useful work, with those of a program (all pairs of its blocks, whole tiles) what that executes.
    """
    runs = ((layer, 1) for layer in range(model.num_layers))
    layers = _of_layers(model, runs, tokens=tokens, pairs=pairs, rows=rows)
    return layers | {"head": head(model, tokens)}


def useful(model: ModelConfig, sequence_length: int) -> dict[str, Flops]:
    """Return the useful FLOPs of one sequence, by kind of product."""
    return components(
        model,
        tokens=sequence_length,
        pairs=lambda window: model.num_heads * attended_pairs(sequence_length, window),
        rows=sequence_length * model.top_k,
    )


def _expert_rows(config: Config, tokens: int, num_ranks: int) -> int:
    """Return the rows that pass one rank's experts in a layer: its whole buffer, in tiles."""
    model = config.model
    if not model.num_routed_layers:
        return 0
    limit = capacity(config.parallel.capacity_factor, tokens, model.top_k)
    rows = received_rows(tokens, model.top_k, num_ranks, limit)
    return visited_rows(rows, model.num_experts // num_ranks, *CPU_TILE)


def _computed_again(
    model: ModelConfig,
    again: Collection[str],
    runs: Iterable[tuple[int, int]],
    *,
    tokens: int,
    pairs: Callable[[int | None], int],
    rows: int,
) -> dict[str, int]:
    """Return the forward FLOPs that the backward pass repeats, by kind; `again` names results.

    The last products of a block's second half are repeated only for a norm that reads them.
    """
    gate = {"none": 0, "headwise": 1, "elementwise": model.head_dim}[model.attention_gate]
    width, head_dim = model.d_model, model.head_dim
    heads = {
        "query": model.num_heads * head_dim,
        "key": model.num_kv_heads * head_dim,
        "value": model.num_kv_heads * head_dim,
        "attention_gate": model.num_heads * gate,
        "attention_output": model.num_heads * head_dim,
    }
    read_by_norm = model.norm != "pre"

    def gated(name: str, hidden: int, count: int, *, output: bool) -> int:
        inner = matmul(count, width, 2 * hidden).forward if f"{name}_hidden" in again else 0
        outer = matmul(count, hidden, width).forward if f"{name}_output" in again else 0
        return inner + (outer if output else 0)

    def one(layer: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for name, out in heads.items():
            if name in again:
                total["attention_projections"] += matmul(tokens, width, out).forward
        scores = attention_scores(model, pairs(window_of(model, layer))).forward
        if "attention" in again:
            total["attention_scores"] += scores
        elif "attention_logsumexp" in again:
            # It needs the scores, not their product with the values.
            total["attention_scores"] += scores // 2
        if not is_routed(model, layer):
            total["dense_mlp"] += gated("mlp", model.dense_hidden, tokens, output=read_by_norm)
            return total
        if "router_logits" in again:
            total["router"] += router(model, tokens).forward
        total["routed_experts"] += gated("expert", model.expert_hidden, rows, output=True)
        total["shared_expert"] += gated("shared", model.shared_hidden, tokens, output=read_by_norm)
        return total

    sums: Counter[str] = Counter()
    for layer, times in runs:
        sums.update({kind: times * flops for kind, flops in one(layer).items()})
    return sums


@cache
def _ring_pairs_count(piece: int, num_ranks: int, window: int | None) -> int:
    """Return how many pairs of blocks one rank computes in all hops of a ring."""
    own, *others = ring_hops(piece, num_ranks, window)
    pairs_of_others = sum(len(hop.across) + len(hop.within) for hop in others)
    return len(own.across) + 2 * len(own.within) + pairs_of_others


def _head_pairs(config: Config, sizes: Mapping[str, int], window: int | None) -> int:
    """Return the (head, query, key) of one row that one device computes, whole blocks of them."""
    heads, ranks, positions = (
        config.model.num_heads,
        sizes["sequence"],
        row_positions(config, sizes),
    )
    if ranks > 1 and config.parallel.context == "ring":
        piece = positions // PIECES["ring"]
        return heads * _ring_pairs_count(piece, ranks, window) * block_size(piece) ** 2
    length = ranks * positions
    return heads // ranks * block_pairs_count(length, window) * block_size(length) ** 2


def _executed(config: Config, sizes: Mapping[str, int]) -> dict[str, Flops]:
    """Return what one device multiplies in a step."""
    model, train, run = config.model, config.train, passes(config, sizes)
    tokens = microbatch_tokens(config, sizes)

    def pairs(window: int | None) -> int:
        return train.microbatch * _head_pairs(config, sizes, window)

    ranks = num_expert_ranks(sizes, fold_sequence=config.parallel.fold_sequence)
    rows = _expert_rows(config, tokens, ranks)
    parts = _of_layers(model, run.layers(), tokens=tokens, pairs=pairs, rows=rows)
    head_rows = run.num_last * pieces(run.head_tokens, train.head_chunk_tokens).total
    parts["head"] = head(model, head_rows)
    # The cotangents of a tile, sorted by token, times the matrix of which tokens are equal.
    tile = pieces(tokens, EMBEDDING_TILE)
    parts["embedding"] = Flops()
    more = Counter(
        {
            "attention_scores": parts["attention_scores"].forward // 2,
            "head": parts["head"].forward,
            "embedding": run.num_first * 2 * tile.total * tile.size * model.d_model,
        }
    )
    again = recomputed(config)
    more.update(_computed_again(model, again, run.layers(), tokens=tokens, pairs=pairs, rows=rows))
    if "head_normaliser" in again:
        more["head"] += parts["head"].forward
    return {kind: part + Flops(backward=more[kind]) for kind, part in parts.items()}


def step_flops(
    config: Config, sizes: Mapping[str, int], *, executed: bool = False
) -> dict[str, Flops]:
    """Return one device's FLOPs of one optimizer step, by kind of product; `sizes` of all axes.

    `executed` counts what its program multiplies, by the backends that a CPU has: whole blocks of
    attention, whole tiles and unused visits of the routed experts' full buffers, padded chunks of
    the head; in the backward pass the scores and the logits again, and the sums that make the
    embedding's gradient; and what `train.recompute` has it compute again. Under a pipeline it does
    so in every tick, idle or not, and in empty places too.
    """
    if executed:
        return _executed(config, sizes)
    train = config.train
    # Each pipeline rank does its part of every microbatch: as much as all of every P-th. And each
    # rank of a row its part of the row.
    rows = num_microbatches(train, sizes) * train.microbatch // sizes["pipeline"]
    one_row = useful(config.model, train.sequence_length)
    return {kind: part * rows // sizes["sequence"] for kind, part in one_row.items()}


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the useful FLOPs, forward and backward, of training on one token."""
    return sum(part.total for part in useful(model, sequence_length).values()) / sequence_length


PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989.5e12,
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "GH200": 989.5e12,
    "H200": 989.5e12,
    "H200 NVL": 835.5e12,
    "B200": 2.25e15,
    "B300": 2.25e15,
}
"""Dense bf16 FLOP/s by the words of the device's name; the entry with most words decides."""


def peak_flops(device_kind: str) -> float | None:
    """Return a device's peak of dense bf16 FLOP/s; None if its name is not known.

    Source: NVIDIA's data sheets.
    Differs: olmo_core 3.0.0 takes every unknown device, an H200 among them, for an A100.
    """
    words = set(re.split(r"[\s\-_/]+", device_kind))
    known = [name for name in PEAK_FLOPS if set(name.split()) <= words]
    return PEAK_FLOPS[max(known, key=lambda name: len(name.split()))] if known else None
