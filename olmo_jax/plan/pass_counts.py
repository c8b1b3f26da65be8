"""How often one device runs each part of the model in a step, and on what: from the config alone.

The parts are the first (embedding, leading blocks), the body, and the last (trailing blocks, head).
Without a pipeline a microbatch passes all of each once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from olmo_jax.arch.layers import LayerGroups
from olmo_jax.mesh.layout import Layout


class Passes(NamedTuple):
    """Forward passes of each part, each followed by a backward pass.

    `body` are the layers of one pass through it, a stage's under a pipeline, padding layers
    included, each by the number of a layer of its kind and window. A pass of the head has
    `head_tokens` rows, of its blocks a microbatch.
    """

    groups: LayerGroups
    body: tuple[int, ...]
    num_first: int
    num_body: int
    num_last: int
    head_tokens: int

    def layers(self) -> Iterator[tuple[int, int]]:
        """Yield every layer that is run, by the number of one like it, and how often it is."""
        yield from ((layer, self.num_first) for layer in self.groups.leading)
        yield from ((layer, self.num_body) for layer in self.body)
        yield from ((layer, self.num_last) for layer in self.groups.trailing)


def num_ticks(ranks: int, chunks: int, microbatches: int) -> int:
    """Return the ticks of a schedule that have a forward: as many as have a backward.

    In each a rank runs one chunk forward, idle or not.
    """
    # The first rank runs V M forwards without a gap, and the last one begins P - 1 ticks later.
    return chunks * microbatches + ranks - 1


def passes(layout: Layout) -> Passes:
    """Return what one device runs in a step.

    Under a pipeline of P ranks, V chunks and M microbatches: the first part M / P times, the body
    V M + P - 1 times a stage of it, and the head M times on 1 / P of the rows.
    """
    groups, microbatches = layout.groups, layout.num_microbatches
    tokens, ranks = layout.microbatch_tokens, layout.sizes["pipeline"]
    if layout.stages is None:
        return Passes(groups, groups.body, microbatches, microbatches, microbatches, tokens)
    # One program runs on all ranks, so all run what the fullest stage has, in every tick.
    chunks, _, per_stage = layout.stages.shape
    return Passes(
        groups=groups,
        body=groups.body[: groups.period] * (per_stage // groups.period),
        num_first=microbatches // ranks,
        num_body=num_ticks(ranks, chunks, microbatches),
        num_last=microbatches,
        head_tokens=-(-tokens // ranks),
    )
