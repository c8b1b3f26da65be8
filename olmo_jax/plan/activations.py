"""What a device holds for one microbatch: kept results, and the work space of one unit. No jax.

The kept results are exact: tests hold them to the step's jaxpr. The work space is an estimate of
what is alive at the worst moment of the backward pass; see `workspace`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from olmo_jax.config.layers import body_grid, is_routed, layer_plan
from olmo_jax.config.records import Config
from olmo_jax.config.residuals import ALWAYS_KEPT, kept, present
from olmo_jax.parallel.pipeline import SCHEDULES, Schedule
from olmo_jax.parallel.pipeline.segments import segments, tables
from olmo_jax.plan.parameters import block_shapes
from olmo_jax.plan.placed import ITEM_BYTES, leaves
from olmo_jax.plan.static_sizes import (
    block_size,
    capacity,
    num_microbatches,
    pieces,
    received_rows,
)

Sizes = Mapping[str, int]

INPUT = "block_input"
"""What every block keeps whatever the policy: the hidden state that it was given."""


class Shares(NamedTuple):
    """What one device has of one microbatch: tokens, its expert group's, its experts and rows."""

    sequences: int
    tokens: int
    group_tokens: int
    experts: int
    rows: int


def shares(config: Config, sizes: Sizes) -> Shares:
    """Return one device's part of one microbatch."""
    train, model = config.train, config.model
    tokens = train.microbatch * train.sequence_length // sizes["sequence"]
    ranks = sizes["expert"] * (sizes["sequence"] if config.parallel.fold_sequence else 1)
    limit = capacity(config.parallel.capacity_factor, tokens, model.top_k)
    rows = received_rows(tokens, model.top_k, ranks, limit) if model.num_routed_layers else 0
    return Shares(train.microbatch, tokens, ranks * tokens, model.num_experts // ranks, rows)


def result_bytes(config: Config, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of every named result of a block, and of its input, for one microbatch."""
    model, part = config.model, shares(config, sizes)
    item, tokens, rows = ITEM_BYTES[model.dtype], part.tokens, part.rows
    gate = {"none": 0, "headwise": 1, "elementwise": model.head_dim}[model.attention_gate]
    heads = model.num_heads * model.head_dim
    per_token = {
        INPUT: model.d_model,
        "query": heads,
        "key": model.num_kv_heads * model.head_dim,
        "value": model.num_kv_heads * model.head_dim,
        "attention_gate": model.num_heads * gate,
        "attention": heads,
        "attention_output": model.d_model,
        "mlp_hidden": 2 * model.dense_hidden,
        "mlp_output": model.d_model,
        "shared_hidden": 2 * model.shared_hidden,
        "shared_output": model.d_model,
        "combined": model.d_model,
    }
    per_row = {
        "expert_rows": model.d_model,
        "expert_hidden": 2 * model.expert_hidden,
        "expert_output": model.d_model,
    }
    block = block_size(config.train.sequence_length)
    padded = part.sequences * pieces(config.train.sequence_length, block).total
    routes = tokens * model.top_k
    return {
        **{name: item * tokens * width for name, width in per_token.items()},
        **{name: item * rows * width for name, width in per_row.items()},
        # The normaliser of whole blocks of queries, with this device's share of the heads.
        "attention_logsumexp": 4 * padded * model.num_heads // sizes["sequence"],
        "router_logits": 4 * tokens * model.num_experts,
        "router_choice": 4 * routes,
        "router_weights": 4 * routes,
        # Where each route of the group's tokens went, which route a row is, rows of each expert.
        "route_plan": 4 * (part.group_tokens * model.top_k + rows + part.experts),
        "balance_counts": 4 * part.sequences * model.num_experts,
    }


_ATTENTION = ("query", "key", "value", "attention_gate", "attention", "attention_logsumexp")
_DENSE = (INPUT, *_ATTENTION, "attention_output", "mlp_hidden", "mlp_output")
_ROUTED = (
    *(INPUT, *_ATTENTION, "attention_output", "router_logits", "balance_counts"),
    *("route_plan", "expert_rows"),
    *("expert_hidden", "expert_output", "combined", "shared_hidden", "shared_output"),
    *ALWAYS_KEPT,
)

_READ_BY_A_NORM = ("mlp_output", "shared_output", "combined")
"""Backward reads them for the norm after a block's second half, if there is one."""


def _kept_names(config: Config, *, routed: bool) -> tuple[str, ...]:
    there = present(config) | {INPUT, *ALWAYS_KEPT}
    unread = _READ_BY_A_NORM if config.model.norm == "pre" else ()
    names = (kept(config) | {INPUT}) & there - {*unread}
    return tuple(name for name in (_ROUTED if routed else _DENSE) if name in names)


def layer_bytes(config: Config, sizes: Sizes, *, routed: bool) -> dict[str, int]:
    """Return what one block keeps of one microbatch for its backward pass, by name."""
    found = result_bytes(config, sizes)
    return {name: found[name] for name in _kept_names(config, routed=routed)}


def kept_bytes(config: Config, sizes: Sizes) -> dict[str, int]:
    """Return what all layers keep of one microbatch, by name: `train.recompute` decides."""
    total: Counter[str] = Counter()
    for layer in range(config.model.num_layers):
        total.update(layer_bytes(config, sizes, routed=is_routed(config.model, layer)))
    return dict(total)


class Held(NamedTuple):
    """Bytes held for the backward passes to come, at most.

    Without a pipeline `activations` are one microbatch's. With one they are those of the leading
    blocks, and `slots` hold what each chunk keeps; `queues` are hidden states that wait for the
    body or for the first part, and gradients of losses that wait for their turn.
    """

    activations: int
    slots: int = 0
    queues: int = 0


def held(config: Config, sizes: Sizes) -> Held:
    """Return what a device holds of all microbatches in flight."""
    model, part = config.model, shares(config, sizes)
    state = ITEM_BYTES[model.dtype] * part.tokens * model.d_model
    ends = state * (1 + (model.embedding_norm and "embedding" in kept(config)))
    if sizes["pipeline"] == 1:
        return Held(ends + sum(kept_bytes(config, sizes).values()))
    schedule = schedule_of(config, sizes)
    program, leading = segments(schedule), layer_plan(model).leading
    waiting = program.inbox_groups + program.outbox_groups
    turns = schedule.microbatches if program.turns_wait else 0
    return Held(
        activations=program.first_slots * (state + _layers_bytes(config, sizes, leading)),
        slots=tables(schedule).num_slots * chunk_bytes(config, sizes),
        queues=waiting * schedule.ranks * state + turns * state // schedule.ranks,
    )


def chunk_bytes(config: Config, sizes: Sizes) -> int:
    """Return what one chunk of a pipeline keeps of one microbatch; empty places keep as much."""
    places = body_grid(config.model, *schedule_shape(config, sizes)).layer.shape[2]
    return places * _layers_bytes(config, sizes, layer_plan(config.model).body[:1])


def _tick_bytes(config: Config, sizes: Sizes) -> int:
    if sizes["pipeline"] == 1:
        return 0
    body = [leaf for leaf in leaves(config, sizes) if leaf.unit == "body"]
    gradients = 4 * sum(leaf.elements(leaf.placed.resident) for leaf in body)
    return 2 * chunk_bytes(config, sizes) + gradients // config.parallel.pipeline_chunks


def _layers_bytes(config: Config, sizes: Sizes, layers: Sequence[int]) -> int:
    kinds = [is_routed(config.model, layer) for layer in layers]
    return sum(sum(layer_bytes(config, sizes, routed=kind).values()) for kind in kinds)


def schedule_shape(config: Config, sizes: Sizes) -> tuple[int, int]:
    """Return the ranks of the pipeline and the chunks of each."""
    return sizes["pipeline"], config.parallel.pipeline_chunks


def schedule_of(config: Config, sizes: Sizes) -> Schedule:
    """Return the schedule of a step's microbatches.

    Raises: UserError if they do not fit it.
    """
    make = SCHEDULES[config.parallel.pipeline_schedule]
    return make(*schedule_shape(config, sizes), num_microbatches(config.train, sizes))


class Workspace(NamedTuple):
    """Bytes alive beside what is kept, each at its own moment of a microbatch: the largest counts.

    `block` is the backward pass of one block, with what it computes again; `dispatch` of it are the
    buffers of the expert group; `logits` one chunk of the head with its gradient. `tick` is, over a
    pipeline, what a chunk keeps on its way into a slot and out of another, and its gradients.
    """

    block: int
    dispatch: int
    logits: int
    tick: int = 0

    @property
    def most(self) -> int:
        return self.tick + max(self.block + self.dispatch, self.logits)


GROUP_SUMS: Mapping[str, Callable[[int], int]] = {
    "cpu": lambda top_k: 2 * (top_k + 1),
    "gpu": lambda top_k: 3,
}
"""How many FP32 arrays [tokens of the expert group, d_model] are alive at once.

XLA:GPU fuses the gathers of a token's rows into their sum; XLA:CPU makes an array of each slot, and
twice: once for dispatch, once for combine. As compiled: see docs/planning.md.
"""


def _largest(config: Config, sizes: Sizes, measure: Callable[[Mapping[str, int]], int]) -> int:
    kinds = {is_routed(config.model, layer) for layer in range(config.model.num_layers)}
    found = result_bytes(config, sizes)
    names = {True: _ROUTED, False: _DENSE}
    return max(measure({name: found[name] for name in names[kind]}) for kind in kinds)


def _attention_block(config: Config) -> int:
    """Return the FP32 logits of one pair of blocks, of which five arrays are alive in backward."""
    block = block_size(config.train.sequence_length)
    return 5 * 4 * config.train.microbatch * config.model.num_heads * block * block


def _activated(config: Config, part: Shares) -> tuple[int, int]:
    """Return the elements between the products of a dense block's MLP, and of a routed one's."""
    model = config.model
    dense = part.tokens * model.dense_hidden if model.num_dense_layers else 0
    return dense, part.rows * model.expert_hidden + part.tokens * model.shared_hidden


def _block_elements(config: Config, sizes: Sizes) -> int:
    """Return the parameters of the largest block, as one device computes with them."""
    model = config.model
    kinds = {is_routed(model, layer): layer for layer in range(model.num_layers)}
    return max(
        sum(
            leaf.size // (sizes["expert"] if "experts" in leaf.dims else 1)
            for leaf in block_shapes(model, layer).values()
        )
        for layer in kinds.values()
    )


def workspace(config: Config, sizes: Sizes, platform: str = "gpu") -> Workspace:
    """Estimate the work space of one microbatch, as the compiler for `platform` lays it out.

    A block's backward pass holds every result of the block and its cotangent: the kept ones are
    counted with the layers, so what was computed again comes once more (and half as much that has
    no name), and all cotangents. The
    transport `gather` holds the group's tokens in the compute dtype and sums over them in FP32.
    """
    model, part = config.model, shares(config, sizes)
    saved = kept(config) | {INPUT}
    item = ITEM_BYTES[model.dtype]

    def backward(results: Mapping[str, int]) -> int:
        again = sum(size for name, size in results.items() if name not in saved)
        return again * 3 // 2 + sum(results.values())

    block = _largest(config, sizes, backward)
    # FP32 values inside norms; what SwiGLU returns, and its cotangent; the unit's FP32 gradient.
    block += 8 * 4 * part.tokens * model.d_model
    block += 2 * item * max(_activated(config, part))
    block += 4 * _block_elements(config, sizes)
    wide = part.group_tokens * model.d_model if model.num_routed_layers else 0
    chunk = pieces(-(-part.tokens // sizes["pipeline"]), config.train.head_chunk_tokens)
    # Logits, their gradient in FP32 and in the compute dtype; the head's input and its gradient;
    # the weight's gradient.
    logits = chunk.size * model.vocab_size * (8 + item) + 2 * item * chunk.total * model.d_model
    logits += 4 * model.vocab_size * model.d_model
    return Workspace(
        block=block + (_attention_block(config) if platform == "cpu" else 0),
        dispatch=wide * (item + 4 * GROUP_SUMS[platform](model.top_k)),
        logits=logits,
        tick=_tick_bytes(config, sizes),
    )
