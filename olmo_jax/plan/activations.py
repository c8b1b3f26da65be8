"""What a device holds of the microbatches in flight, and the work space of one unit. No jax.

What is kept is exact (see `residuals`). The work space is an estimate of what is alive at the worst
moment of the backward pass.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from olmo_jax.config.layers import is_routed, layer_plan
from olmo_jax.config.records import Config
from olmo_jax.config.residuals import kept
from olmo_jax.mesh.axes import num_expert_ranks
from olmo_jax.parallel.pipeline.segments import segments
from olmo_jax.plan.parameters import block_shapes
from olmo_jax.plan.passes import microbatch_tokens, passes, schedule_of
from olmo_jax.plan.placed import leaves
from olmo_jax.plan.residuals import (
    Residual,
    block_residuals,
    block_results,
    slot_bytes,
    stage_residuals,
)
from olmo_jax.plan.static_sizes import ITEM_BYTES, block_size, pieces

Sizes = Mapping[str, int]


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
    model, plan = config.model, layer_plan(config.model)
    state = ITEM_BYTES[model.dtype] * microbatch_tokens(config, sizes) * model.d_model
    # The rows of the embedding, and the head's input.
    ends = state * (1 + (model.embedding_norm and "embedding" in kept(config)))
    if sizes["pipeline"] == 1:
        return Held(ends + kept_bytes(config, sizes, range(model.num_layers)))
    schedule = schedule_of(config, sizes)
    program = segments(schedule)
    waiting = program.inbox_groups + program.outbox_groups
    turns = schedule.microbatches if program.turns_wait else 0
    return Held(
        activations=program.first_slots * (state + kept_bytes(config, sizes, plan.leading)),
        slots=slot_bytes(config, sizes),
        queues=waiting * schedule.ranks * state + turns * state // schedule.ranks,
    )


def kept_bytes(config: Config, sizes: Sizes, layers: Iterable[int]) -> int:
    """Return what these layers keep of one microbatch."""
    numbers = Counter(is_routed(config.model, layer) for layer in layers)
    return sum(
        number * total_bytes(block_residuals(config, sizes, routed=routed))
        for routed, number in numbers.items()
    )


def total_bytes(residuals: Iterable[Residual]) -> int:
    """Return the bytes of all of them."""
    return sum(each.num_bytes for each in residuals)


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


def workspace(config: Config, sizes: Sizes, platform: str = "gpu") -> Workspace:
    """Estimate the work space of one microbatch, as the compiler for `platform` lays it out.

    A block's backward pass holds every result of the block and its cotangent: the kept ones are
    counted with the layers, so what was computed again comes once more (and half as much that has
    no name), and all cotangents. The transport `gather` holds the group's tokens in the compute
    dtype and sums over them in FP32.
    """
    model, tokens = config.model, microbatch_tokens(config, sizes)
    item = ITEM_BYTES[model.dtype]
    kinds = {is_routed(model, layer) for layer in range(model.num_layers)}
    # FP32 values inside norms, beside the blocks' own.
    block = 8 * 4 * tokens * model.d_model
    block += max(_backward_bytes(config, sizes, routed=routed) for routed in kinds)
    block += 4 * _block_elements(config, sizes)
    ranks = num_expert_ranks(sizes, fold_sequence=config.parallel.fold_sequence)
    wide = ranks * tokens * model.d_model if model.num_routed_layers else 0
    return Workspace(
        block=block + (_attention_block(config) if platform == "cpu" else 0),
        dispatch=wide * (item + 4 * GROUP_SUMS[platform](model.top_k)),
        logits=_head_bytes(config, sizes),
        tick=_tick_bytes(config, sizes),
    )


def _backward_bytes(config: Config, sizes: Sizes, *, routed: bool) -> int:
    """Return what was computed again, all cotangents, and what SwiGLU returned and its own."""
    saved = kept(config)
    results = list(block_results(config, sizes, routed=routed))
    again = total_bytes(each for each in results if each.name not in saved)
    hidden = total_bytes(each for each in results if each.name.endswith("_hidden"))
    # SwiGLU halves the width.
    return again * 3 // 2 + total_bytes(results) + 2 * hidden // 2


def _head_bytes(config: Config, sizes: Sizes) -> int:
    """Return the bytes of a chunk of logits and all that its gradients need.

    Logits, their gradient in FP32 and in the compute dtype; the head's input and its gradient; the
    weight's gradient.
    """
    model, item = config.model, ITEM_BYTES[config.model.dtype]
    chunk = pieces(passes(config, sizes).head_tokens, config.train.head_chunk_tokens)
    logits = chunk.size * model.vocab_size * (8 + item)
    return logits + 2 * item * chunk.total * model.d_model + 4 * model.vocab_size * model.d_model


def _attention_block(config: Config) -> int:
    """Return the FP32 logits of one pair of blocks, of which five arrays are alive in backward."""
    block = block_size(config.train.sequence_length)
    return 5 * 4 * config.train.microbatch * config.model.num_heads * block * block


def _tick_bytes(config: Config, sizes: Sizes) -> int:
    if sizes["pipeline"] == 1:
        return 0
    body = [leaf for leaf in leaves(config, sizes) if leaf.unit == "body"]
    gradients = 4 * sum(leaf.elements(leaf.placed.resident) for leaf in body)
    chunk = total_bytes(stage_residuals(config, sizes))
    return 2 * chunk + gradients // config.parallel.pipeline_chunks


def _block_elements(config: Config, sizes: Sizes) -> int:
    """Return the parameters of the largest block, as one device computes with them."""
    model = config.model
    ranks = num_expert_ranks(sizes, fold_sequence=config.parallel.fold_sequence)
    kinds = {is_routed(model, layer): layer for layer in range(model.num_layers)}
    return max(
        sum(
            leaf.size // (ranks if "experts" in leaf.dims else 1)
            for leaf in block_shapes(model, layer).values()
        )
        for layer in kinds.values()
    )
