"""What a device holds of the microbatches in flight, and the work space of one unit. No jax.

What is kept is exact (see `residuals`). The work space is an estimate of what is alive at the worst
moment of the backward pass.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from olmo_jax.arch.activations import (
    Activation,
    block_activations,
    block_residuals,
    saved_names,
)
from olmo_jax.arch.layers import is_routed
from olmo_jax.arch.parameters import block
from olmo_jax.arch.sizes import ITEM_BYTES, block_size, pieces
from olmo_jax.mesh.layout import Layout
from olmo_jax.parallel.pipeline.of_layout import schedule_of
from olmo_jax.parallel.pipeline.segments import segments
from olmo_jax.plan.pass_counts import passes
from olmo_jax.plan.slots import slot_bytes, stage_residuals


class Held(NamedTuple):
    """Bytes held for the backward passes to come, at most.

    Without a pipeline `activations` are one microbatch's. With one they are those of the leading
    blocks, and `slots` hold what each chunk keeps; `queues` are hidden states that wait for the
    body or for the first part, and gradients of losses that wait for their turn.
    """

    activations: int
    slots: int = 0
    queues: int = 0


def held(layout: Layout) -> Held:
    """Return what a device holds of all microbatches in flight."""
    model, groups = layout.model, layout.groups
    state = ITEM_BYTES[model.dtype] * layout.microbatch_tokens * model.d_model
    # The rows of the embedding, and the head's input.
    ends = state * (1 + (model.embedding_norm and "embedding" in saved_names(layout.config)))
    if layout.sizes["pipeline"] == 1:
        return Held(ends + kept_bytes(layout, range(model.num_layers)))
    schedule = schedule_of(layout)
    program = segments(schedule)
    # The executor's own program: how many groups wait at most is a property of the schedule.
    waiting = program.inbox_groups + program.outbox_groups
    turns = schedule.microbatches if program.turns_wait else 0
    return Held(
        activations=program.first_slots * (state + kept_bytes(layout, groups.leading)),
        slots=slot_bytes(layout),
        queues=waiting * schedule.ranks * state + turns * state // schedule.ranks,
    )


def kept_bytes(layout: Layout, layers: Iterable[int]) -> int:
    """Return what these layers keep of one microbatch."""
    saved = saved_names(layout.config)
    numbers = Counter(is_routed(layout.model, layer) for layer in layers)
    return sum(
        number * _total_bytes(block_residuals(layout.model, layout.device, saved, routed=routed))
        for routed, number in numbers.items()
    )


def _total_bytes(residuals: Iterable[Activation]) -> int:
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


def workspace(layout: Layout, platform: str = "gpu") -> Workspace:
    """Estimate the work space of one microbatch, as the compiler for `platform` lays it out.

    A block's backward pass holds every result of the block and its cotangent: the kept ones are
    counted with the layers, so what was computed again comes once more (and half as much that has
    no name), and all cotangents. The transport `gather` holds the group's tokens in the compute
    dtype and sums over them in FP32.
    """
    model, tokens = layout.model, layout.microbatch_tokens
    item = ITEM_BYTES[model.dtype]
    kinds = {is_routed(model, layer) for layer in range(model.num_layers)}
    # FP32 values inside norms, beside the blocks' own.
    work = 8 * 4 * tokens * model.d_model
    work += max(_backward_bytes(layout, routed=routed) for routed in kinds)
    work += 4 * _block_elements(layout)
    ranks = layout.num_expert_ranks
    wide = ranks * tokens * model.d_model if model.num_routed_layers else 0
    return Workspace(
        block=work + (_attention_block(layout) if platform == "cpu" else 0),
        dispatch=wide * (item + 4 * GROUP_SUMS[platform](model.top_k)),
        logits=_head_bytes(layout),
        tick=_tick_bytes(layout),
    )


def _backward_bytes(layout: Layout, *, routed: bool) -> int:
    """Return what was computed again, all cotangents, and what SwiGLU returned and its own."""
    saved = saved_names(layout.config)
    results = list(block_activations(layout.model, layout.device, saved, routed=routed))
    again = _total_bytes(each for each in results if each.name not in saved)
    hidden = _total_bytes(each for each in results if each.name.endswith("_hidden"))
    # SwiGLU halves the width. 3 / 2: what is rematerialized, and half as much without a name.
    return again * 3 // 2 + _total_bytes(results) + 2 * hidden // 2


def _head_bytes(layout: Layout) -> int:
    """Return the bytes of a chunk of logits and all that its gradients need.

    Logits, their gradient in FP32 and in the compute dtype; the head's input and its gradient; the
    weight's gradient.
    """
    model, item = layout.model, ITEM_BYTES[layout.model.dtype]
    chunk = pieces(passes(layout).head_tokens, layout.train.head_chunk_tokens)
    logits = chunk.size * model.vocab_size * (8 + item)
    return logits + 2 * item * chunk.total * model.d_model + 4 * model.vocab_size * model.d_model


def _attention_block(layout: Layout) -> int:
    """Return the FP32 logits of one pair of blocks, of which five arrays are alive in backward."""
    block = block_size(layout.train.sequence_length)
    return 5 * 4 * layout.train.microbatch * layout.model.num_heads * block * block


def _tick_bytes(layout: Layout) -> int:
    if layout.sizes["pipeline"] == 1:
        return 0
    body = [leaf for leaf in layout.sharded if leaf.unit == "body"]
    gradients = 4 * sum(leaf.elements(leaf.specs.resident) for leaf in body)
    chunk = _total_bytes(stage_residuals(layout))
    # A slot is written whole and read whole, and a chunk's accumulator is copied to be added to.
    return 2 * chunk + gradients // layout.config.parallel.pipeline_chunks


def _block_elements(layout: Layout) -> int:
    """Return the parameters of the largest block, as one device computes with them."""
    model = layout.model
    ranks = layout.num_expert_ranks
    kinds = {is_routed(model, layer) for layer in range(model.num_layers)}
    return max(
        sum(
            leaf.size // (ranks if "experts" in leaf.dims else 1)
            for leaf in block(model, routed=routed).values()
        )
        for routed in kinds
    )
