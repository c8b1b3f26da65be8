"""Hardware FLOPs: those of every product in the program of a step, needed or not. No jax.

Model FLOPs, and the convention, are in `arch/flops.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache

from olmo_jax.arch.activations import rematerialized_names
from olmo_jax.arch.flops import (
    Flops,
    attended_pairs,
    attention_scores,
    gate_width,
    head,
    matmul,
    model_flops,
    of_layers,
    router,
)
from olmo_jax.arch.layers import is_routed, window_of
from olmo_jax.arch.sizes import (
    CPU_TILE,
    EMBEDDING_TILE,
    PIECES,
    block_size,
    pieces,
    ring_hops,
    visited_rows,
)
from olmo_jax.config.records import ModelConfig
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.pass_counts import passes


def block_pairs_count(length: int, window: int | None) -> int:
    """Return how many pairs `block_pairs` lists, without listing them."""
    # Query block i sees key block i - d if its first query sees the last key there:
    # (d - 1) block + 1 < window, so d <= ceil((window - 1) / block). See `arch.sizes.block_pairs`.
    block = block_size(length)
    reach = None if window is None else math.ceil((window - 1) / block) + 1
    return attended_pairs(math.ceil(length / block), reach)


def _expert_rows(layout: Layout) -> int:
    """Return the rows that pass one rank's experts in a layer: its whole buffer, in tiles."""
    model, device = layout.model, layout.device
    if not model.num_routed_layers:
        return 0
    num_local = model.num_experts // device.expert_ranks
    return visited_rows(device.received_rows, num_local, *CPU_TILE)


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
    width, head_dim = model.d_model, model.head_dim
    heads = {
        "query": model.num_heads * head_dim,
        "key": model.num_kv_heads * head_dim,
        "value": model.num_kv_heads * head_dim,
        "attention_gate": model.num_heads * gate_width(model),
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
    # Of its own keys a rank has both diagonals and one pair of pieces across, of others two pairs.
    own, *others = ring_hops(piece, num_ranks, window)
    pairs_of_others = sum(len(hop.across) + len(hop.within) for hop in others)
    return len(own.across) + 2 * len(own.within) + pairs_of_others


def _head_pairs(layout: Layout, window: int | None) -> int:
    """Return the (head, query, key) of one row that one device computes, whole blocks of them."""
    heads, ranks, positions = layout.model.num_heads, layout.sizes["sequence"], layout.positions
    if ranks > 1 and layout.config.parallel.context == "ring":
        piece = positions // PIECES["ring"]
        return heads * _ring_pairs_count(piece, ranks, window) * block_size(piece) ** 2
    length = ranks * positions
    return heads // ranks * block_pairs_count(length, window) * block_size(length) ** 2


def hardware_flops(layout: Layout) -> dict[str, Flops]:
    """Return what one device multiplies in a step, by kind of product, by a CPU's backends.

    Whole blocks of attention, whole tiles and unneeded visits of the routed experts' full buffers,
    padded chunks of the head; in the backward pass the scores and the logits again, and the sums
    that make the embedding's gradient; and what `train.recompute` rematerializes. Under a pipeline
    it does so in every tick, idle or not, and in padding layers too.
    """
    model, train, run = layout.model, layout.train, passes(layout)
    tokens = layout.microbatch_tokens

    def pairs(window: int | None) -> int:
        return train.microbatch * _head_pairs(layout, window)

    rows = _expert_rows(layout)
    parts = of_layers(model, run.layers(), tokens=tokens, pairs=pairs, rows=rows)
    head_rows = run.num_last * pieces(run.head_tokens, train.head_chunk_tokens).total
    parts["head"] = head(model, head_rows)
    # `ops.embedding` multiplies each tile of cotangents by the [tile, tile] matrix of equal tokens.
    tile = pieces(tokens, EMBEDDING_TILE)
    parts["embedding"] = Flops()
    more = Counter(
        {
            "attention_scores": parts["attention_scores"].forward // 2,
            "head": parts["head"].forward,
            "embedding": run.num_first * 2 * tile.total * tile.size * model.d_model,
        }
    )
    again = rematerialized_names(layout.config)
    more.update(_computed_again(model, again, run.layers(), tokens=tokens, pairs=pairs, rows=rows))
    if "head_normaliser" in again:
        more["head"] += parts["head"].forward
    return {kind: part + Flops(backward=more[kind]) for kind, part in parts.items()}


def device_model_flops(layout: Layout) -> dict[str, Flops]:
    """Return one device's share of the model FLOPs of one optimizer step, by kind of product."""
    train, sizes = layout.train, layout.sizes
    # Each pipeline rank does its part of every microbatch: as much as all of every P-th. And each
    # rank of a row its part of the row.
    rows = layout.num_microbatches * train.microbatch // sizes["pipeline"]
    one_row = model_flops(layout.model, train.sequence_length)
    return {kind: part * rows // sizes["sequence"] for kind, part in one_row.items()}
