"""How often one device runs each part of the model in a step, and on what: from the config alone.

The parts are the first (embedding, leading blocks), the body, and the last (trailing blocks, head).
Without a pipeline a microbatch passes all of each once.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from olmo_jax.config.layers import LayerPlan, body_grid, layer_plan
from olmo_jax.config.records import Config
from olmo_jax.parallel.pipeline import SCHEDULES, Schedule, forward_only
from olmo_jax.plan.static_sizes import num_microbatches, padded_length


class Passes(NamedTuple):
    """Forward passes of each part, each followed by a backward pass.

    `body` are the layers of one pass through it, a stage's under a pipeline: places, each by the
    number of a layer of its kind and window. A pass of the head has `head_tokens` rows, of its
    blocks a microbatch.
    """

    plan: LayerPlan
    body: tuple[int, ...]
    num_first: int
    num_body: int
    num_last: int
    head_tokens: int

    def layers(self) -> Iterator[tuple[int, int]]:
        """Yield every layer that is run, by the number of one like it, and how often it is."""
        yield from ((layer, self.num_first) for layer in self.plan.leading)
        yield from ((layer, self.num_body) for layer in self.body)
        yield from ((layer, self.num_last) for layer in self.plan.trailing)


def num_ticks(ranks: int, chunks: int, microbatches: int) -> int:
    """Return the ticks with a forward of a lock-step schedule, which are those with a backward.

    In each a rank runs one chunk forward, idle or not.
    """
    return chunks * microbatches + ranks - 1


def schedule_of(config: Config, sizes: Mapping[str, int], *, training: bool = True) -> Schedule:
    """Return the order in which a pipeline runs a step's microbatches, or an evaluation's.

    Raises: UserError if they do not fit it.
    """
    make = SCHEDULES[config.parallel.pipeline_schedule] if training else forward_only
    microbatches = num_microbatches(config.train, sizes)
    return make(sizes["pipeline"], config.parallel.pipeline_chunks, microbatches)


def passes(config: Config, sizes: Mapping[str, int]) -> Passes:
    """Return what one device runs in a step.

    Under a pipeline of P ranks, V chunks and M microbatches: the first part M / P times, the body
    V M + P - 1 times a stage of it, and the head M times on 1 / P of the rows.
    """
    plan, microbatches = layer_plan(config.model), num_microbatches(config.train, sizes)
    tokens, ranks = microbatch_tokens(config, sizes), sizes["pipeline"]
    if ranks == 1:
        return Passes(plan, plan.body, microbatches, microbatches, microbatches, tokens)
    chunks = config.parallel.pipeline_chunks
    places = body_grid(config.model, ranks, chunks).layer.shape[2]
    return Passes(
        plan=plan,
        body=plan.body[: plan.period] * (places // plan.period),
        num_first=microbatches // ranks,
        num_body=num_ticks(ranks, chunks, microbatches),
        num_last=microbatches,
        head_tokens=-(-tokens // ranks),
    )


def row_positions(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the positions that one device has of a row, padding to equal pieces included."""
    ranks, length = sizes["sequence"], config.train.sequence_length
    return padded_length(length, config.parallel.context, ranks) // ranks


def microbatch_tokens(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the tokens that one device has of a microbatch."""
    return config.train.microbatch * row_positions(config, sizes)
