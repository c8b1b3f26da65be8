"""The time of a step as a sum of named terms: work over rates. An estimate; nothing is hidden.

Products run at a part of the peak, what is not a product at a part of the memory's rate, transfers
at a part of the link's. XLA hides some transfers behind products; the sum does not.
"""

from collections.abc import Mapping
from typing import NamedTuple

from olmo_jax.config.layers import body_grid, layer_plan
from olmo_jax.config.records import Config
from olmo_jax.parallel.pipeline import bubble
from olmo_jax.plan.activations import result_bytes, schedule_of
from olmo_jax.plan.communication import Traffic
from olmo_jax.plan.flops import flops_per_token, step_flops
from olmo_jax.plan.hardware import Hardware, bytes_per_s
from olmo_jax.plan.memory import Memory
from olmo_jax.plan.static_sizes import num_microbatches

Sizes = Mapping[str, int]

PASSES = 6
"""How often each result of a block goes through memory: written and read forward, read backward
with its cotangent, which is written and read."""

UPDATE_BYTES = 34
"""What AdamW moves of a parameter's shard: gradient 4 twice (norm and clip), main and moments read
and written 24, the weight in bf16 written 2."""

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


def share_of_layers(config: Config, sizes: Sizes) -> tuple[float, float]:
    """Return how much of the model's layers a rank computes: for the model, and in empty places."""
    plan, ranks = layer_plan(config.model), sizes["pipeline"]
    if ranks == 1:
        return 1.0, 0.0
    grid = body_grid(config.model, ranks, config.parallel.pipeline_chunks)
    return 1 / ranks, grid.waste / (len(plan.body) + len(plan.leading)) / ranks


class Work(NamedTuple):
    """FLOPs of one device and step: what backends execute, by kind of term."""

    products: float
    attention: float
    recompute: float
    empty: float

    @property
    def total(self) -> float:
        return sum(self)


def _executed(config: Config, sizes: Sizes) -> dict[str, int]:
    """Return the FLOPs that a data rank executes for all layers, by kind."""
    flops = step_flops(config, {**sizes, "pipeline": 1}, executed=True)
    return {kind: part.total for kind, part in flops.items()}


def work(config: Config, sizes: Sizes) -> Work:
    """Return what one device multiplies in a step.

    Over a pipeline a rank has its part of the layers, empty places besides, and of both ends.
    """
    plain = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": "none"})}
    )
    kinds = _executed(plain, sizes)
    again = sum(_executed(config, sizes).values()) - sum(kinds.values())
    own, empty = share_of_layers(config, sizes)
    scale = 1 / sizes["sequence"]
    total, attention = sum(kinds.values()), kinds["attention_scores"]
    layers = total - kinds["head"] - kinds["embedding"]
    return Work(
        products=scale * own * (total - attention),
        attention=scale * own * attention,
        recompute=scale * own * again,
        empty=scale * empty * (layers + again),
    )


def _elementwise_bytes(config: Config, sizes: Sizes, held: Memory) -> float:
    """Return what goes through memory in a step beside the operands of products.

    Results of blocks, and the FP32 accumulators, which every microbatch reads and writes.
    """
    results = result_bytes(config, sizes)
    own, empty = share_of_layers(config, sizes)
    routed, dense = config.model.num_routed_layers, config.model.num_dense_layers
    only_dense = results["mlp_hidden"] + results["mlp_output"]
    both = sum(
        results[name]
        for name in (
            *("block_input", "query", "key", "value", "attention_gate"),
            *("attention", "attention_output"),
        )
    )
    only_routed = sum(results.values()) - both - only_dense
    one = routed * (both + only_routed) + dense * (both + only_dense)
    microbatches = num_microbatches(config.train, sizes)
    return microbatches * (PASSES * (own + empty) * one + 2 * held.gradients)


def term_of(traffic: Traffic) -> str:
    """Return the term that a transfer belongs to."""
    if "pipeline" in traffic.axes and traffic.in_loop:
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


def bubble_share(config: Config, sizes: Sizes) -> float:
    """Return the part of a pipeline's time in which a rank has nothing to do."""
    return 0.0 if sizes["pipeline"] == 1 else float(bubble(schedule_of(config, sizes)))


def step_time(
    config: Config,
    sizes: Sizes,
    hardware: Hardware,
    traffic: tuple[Traffic, ...],
    held: Memory,
) -> dict[str, float]:
    """Return the seconds of each term of `TERMS`; `held` and `traffic` are the plan's own."""
    matmul = hardware.peak_flops * hardware.matmul_efficiency
    memory = hardware.memory_bytes_per_s * hardware.memory_efficiency
    multiplied = work(config, sizes)
    terms = dict.fromkeys(TERMS, 0.0)
    terms |= {
        "products": multiplied.products / matmul,
        "attention": multiplied.attention / (hardware.peak_flops * hardware.attention_efficiency),
        "recompute": multiplied.recompute / matmul,
        "empty places": multiplied.empty / matmul,
        "memory": _elementwise_bytes(config, sizes, held) / memory,
        "update": UPDATE_BYTES * held.main / 4 / memory,
    }
    for each in traffic:
        terms[term_of(each)] += transfer_s(each, hardware, sizes)
    idle = bubble_share(config, sizes)
    in_ticks = ("products", "attention", "recompute", "empty places", "memory")
    in_ticks += ("expert traffic", "weight traffic", "sequence traffic", "stage traffic")
    terms["bubble"] = idle / (1 - idle) * sum(terms[name] for name in in_ticks)
    return terms


def model_flops_utilisation(
    config: Config, num_devices: int, seconds: float, hardware: Hardware
) -> float:
    """Return useful FLOPs over what the devices' peaks would do in that time."""
    train = config.train
    tokens = train.global_batch * train.sequence_length
    useful = flops_per_token(config.model, train.sequence_length) * tokens
    return useful / (num_devices * hardware.peak_flops * seconds)
