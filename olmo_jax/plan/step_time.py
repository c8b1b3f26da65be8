"""The time of a step as a sum of named terms: work over rates. An estimate; nothing is hidden.

Products run at a part of the peak, what is not a product at a part of the memory's rate, transfers
at a part of the link's. XLA hides some transfers behind products; the sum does not.
"""

from dataclasses import replace
from typing import NamedTuple

from olmo_jax.arch.activations import block_activations, saved_names
from olmo_jax.arch.flops import flops_per_token
from olmo_jax.arch.layers import is_routed
from olmo_jax.mesh.layout import Layout
from olmo_jax.mesh.specs import Sizes
from olmo_jax.parallel.pipeline import bubble
from olmo_jax.parallel.pipeline.of_layout import schedule_of
from olmo_jax.plan.communication import Traffic
from olmo_jax.plan.flops import hardware_flops
from olmo_jax.plan.hardware import Hardware, bytes_per_s
from olmo_jax.plan.pass_counts import passes
from olmo_jax.plan.state_memory import Memory

PASSES = 6
"""How often each result of a block goes through memory: written and read forward, read backward
with its cotangent, which is written and read."""

UPDATE_BYTES = 34
"""What AdamW moves of a parameter's shard: gradient 4 twice (norm and clip), main and moments read
and written 24, the weight in bf16 written 2."""

OF_LAYERS = (
    *("products", "attention", "recompute", "memory"),
    *("expert traffic", "weight traffic", "sequence traffic", "stage traffic"),
)
"""The terms that grow with the runs of layers."""

TERMS = {
    "products": "matrix products of the model, whole buffers of rows",
    "attention": "scores, and products with the values",
    "recompute": "products that backward computes again",
    "empty places": "layers that the stages have room for and the model has not",
    "memory": "what is not a product: norms, activations, routing, adding up gradients",
    "expert traffic": "rows to the experts and back",
    "weight traffic": "FSDP's gathers and scatters in every microbatch",
    "sequence traffic": "context parallelism",
    "stage traffic": "hidden states between stages, and to and from the ends",
    "bubble": "ranks that wait while the pipeline fills and drains",
    "reduction": "gradients to their shards and weights back, once a step",
    "update": "AdamW on the shard",
    "other": "counts, metrics and the norm",
}
"""Name of a term to what it is, in the order in which they are shown."""


class Shares(NamedTuple):
    """Of all that layers do in a step, padding and idle ticks included, the part of each."""

    model: float
    empty: float
    idle: float


def shares(layout: Layout) -> Shares:
    """Return how the runs of layers divide. A rank that is idle, and a padding layer, run too."""
    ranks, run = layout.sizes["pipeline"], passes(layout)
    if layout.stages is None:
        return Shares(1.0, 0.0, 0.0)
    body = run.num_body * len(run.body)
    others = run.num_first * len(run.groups.leading) + run.num_last * len(run.groups.trailing)
    of_body = body / (body + others)
    # Of V M + P - 1 ticks a rank is idle in P - 1. Of its other ticks, padding has its share.
    idle = (ranks - 1) / run.num_body
    empty = (1 - idle) * layout.stages.num_padding / layout.stages.num_positions
    return Shares(1 - of_body * (idle + empty), of_body * empty, of_body * idle)


class Work(NamedTuple):
    """Hardware FLOPs of one device and step: of layers, of their attention, of both ends.

    `again` of the layers' products is what backward repeats.
    """

    products: float
    attention: float
    again: float
    ends: float


def _hardware_flops(layout: Layout) -> dict[str, int]:
    return {kind: part.total for kind, part in hardware_flops(layout).items()}


def work(layout: Layout) -> Work:
    """Return what one device multiplies in a step, in idle ticks too."""
    train = layout.train.model_copy(update={"recompute": "none"})
    config = layout.config.model_copy(update={"train": train})
    # What the policy repeats is the difference between it and no policy at all.
    kinds = _hardware_flops(replace(layout, config=config))
    again = sum(_hardware_flops(layout).values()) - sum(kinds.values())
    ends, attention = kinds["head"] + kinds["embedding"], kinds["attention_scores"]
    return Work(sum(kinds.values()) - ends - attention, attention, again, ends)


def _memory_bytes(layout: Layout, held: Memory) -> float:
    """Return what goes through memory in a step beside the operands of products.

    Results of blocks, and the FP32 accumulators, which every pass of a unit reads and writes.
    """
    run, model, saved = passes(layout), layout.model, saved_names(layout.config)
    results = {
        routed: sum(
            each.num_bytes for each in block_activations(model, layout.device, saved, routed=routed)
        )
        for routed in {is_routed(model, layer) for layer in range(model.num_layers)}
    }
    through = sum(results[is_routed(model, layer)] * times for layer, times in run.layers())
    chunks = 1 if layout.stages is None else layout.config.parallel.pipeline_chunks
    return PASSES * through + 2 * held.gradients * run.num_body / chunks


def term_of(traffic: Traffic) -> str:
    """Return the term that a transfer belongs to."""
    if traffic.axes == ("pipeline",) and traffic.in_loop:
        return "stage traffic"
    if traffic.what.startswith("expert"):
        return "expert traffic"
    if traffic.what in ("weights", "gradients"):
        return "weight traffic" if traffic.in_loop else "reduction"
    if traffic.axes == ("sequence",) and traffic.what not in ("counts", "norm"):
        return "sequence traffic"
    return "other"


def transfer_s(traffic: Traffic, hardware: Hardware, sizes: Sizes) -> float:
    """Return the seconds of a step's transfers of one sort."""
    rate = bytes_per_s(hardware, traffic.axes, sizes)
    return traffic.sent_bytes / rate + traffic.count * hardware.latency_s


def bubble_share(layout: Layout) -> float:
    """Return the part of a pipeline's time in which a rank has nothing to do."""
    return 0.0 if layout.sizes["pipeline"] == 1 else float(bubble(schedule_of(layout)))


def step_time(
    layout: Layout,
    hardware: Hardware,
    traffic: tuple[Traffic, ...],
    held: Memory,
) -> dict[str, float]:
    """Return the seconds of each term of `TERMS`; `held` and `traffic` are the plan's own."""
    matmul = hardware.peak_flops * hardware.matmul_efficiency
    scores = hardware.peak_flops * hardware.attention_efficiency
    memory = hardware.memory_bytes_per_s * hardware.memory_efficiency
    multiplied, share = work(layout), shares(layout)
    terms = dict.fromkeys(TERMS, 0.0)
    for each in traffic:
        terms[term_of(each)] += transfer_s(each, hardware, layout.sizes)
    terms |= {
        "products": multiplied.products / matmul,
        "attention": multiplied.attention / scores,
        "recompute": multiplied.again / matmul,
        "memory": _memory_bytes(layout, held) / memory,
        "update": UPDATE_BYTES * held.main / 4 / memory,
    }
    # Padding layers and idle ticks run the same program, so they take their share of every term of
    # layers. That share is moved to terms of its own, and the sum stays.
    of_layers = sum(terms[name] for name in OF_LAYERS)
    terms |= {name: share.model * terms[name] for name in OF_LAYERS}
    terms["empty places"] = share.empty * of_layers
    terms["bubble"] = share.idle * of_layers
    terms["products"] += multiplied.ends / matmul
    return terms


def model_flops_utilisation(layout: Layout, seconds: float, hardware: Hardware) -> float:
    """Return model FLOPs over what the devices' peaks would do in that time."""
    train = layout.train
    tokens = train.global_batch * train.sequence_length
    needed = flops_per_token(layout.model, train.sequence_length) * tokens
    return needed / (layout.num_devices * hardware.peak_flops * seconds)
