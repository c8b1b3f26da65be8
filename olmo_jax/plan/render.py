"""A plan and a search as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from olmo_jax.formatting import amount, binary_bytes, columns, seconds
from olmo_jax.plan.alternatives import that_fit
from olmo_jax.plan.plan import MethodRow, Plan
from olmo_jax.plan.search import SHOWN, Found, Ranked
from olmo_jax.plan.step_time import TERMS
from olmo_jax.plan.summary import layers

CONVENTION = (
    "2mkn a product, twice that backward; allowed query-key pairs, top_k experts a token; no "
    "lookup, no recomputation, no padding"
)

CATEGORIES = {
    "weights": "weights in the compute dtype",
    "gradients": "FP32 gradients",
    "main": "FP32 main weights",
    "moments": "two FP32 moments",
    "other": "router biases, history, counters",
    "gathered": "weights that FSDP gathered",
    "activations": "kept for backward",
    "slots": "kept for backward, in the pipeline's slots",
    "queues": "hidden states that wait between a pipeline's parts",
    "tick": "a chunk's way into and out of a slot, and its gradients",
    "block": "work space of one block's backward",
    "dispatch": "its dispatch buffers",
    "logits": "or the head's: a chunk of logits, the weight's gradient",
    "total": "at most",
}


def text(plan: Plan) -> str:
    """Return the report of a plan."""
    return "\n".join(
        [
            *_facts(plan),
            "",
            *_methods(plan),
            "",
            *_memory(plan),
            "",
            *_verdict(plan),
            "",
            *_time(plan),
        ]
    )


def _facts(plan: Plan) -> Iterator[str]:
    config, hardware = plan.config, plan.hardware
    used = " x ".join(f"{axis}={number}" for axis, number in plan.sizes.items() if number > 1)
    nodes = -(-plan.num_devices // hardware.devices_per_node)
    yield (
        f"parameters  {plan.total_parameters / 1e9:,.2f} B in all, "
        f"{plan.active_parameters / 1e9:,.2f} B a token"
    )
    yield f"layers      {config.model.num_layers}: {layers(config)}"
    yield f"FLOPs       {plan.flops_per_token / 1e9:,.2f} G model FLOPs a token ({CONVENTION})"
    yield (
        f"mesh        {plan.num_devices} x {hardware.name} in {nodes} node(s)"
        f"{used and ': '}{used}, {config.parallel.method}"
    )
    yield (
        f"batch       {plan.tokens:,} tokens a step, {plan.num_microbatches} microbatches of "
        f"{config.train.microbatch} x {config.train.sequence_length} on each data rank"
    )
    yield f"checkpoint  {binary_bytes(plan.checkpoint_bytes)}"


def _method(row: MethodRow) -> tuple[str, ...]:
    how = "; ".join(row.collectives[:3]) if row.collectives else "-"
    if not row.used:
        return row.method, row.divides, "-", "-", "-", "-", row.keeps if row.method == "TP" else "-"
    return (
        row.method,
        row.divides,
        binary_bytes(row.keeps_bytes) if row.keeps_bytes else "-",
        binary_bytes(row.microbatch_bytes),
        binary_bytes(row.step_bytes),
        seconds(row.seconds),
        how,
    )


def _methods(plan: Plan) -> Iterator[str]:
    yield "what each method asks of a rank; bytes are what it sends"
    head = ("method", "divides", "a rank keeps", "a microbatch", "a step", "time", "how")
    for line in columns([head, *map(_method, plan.methods)], left=2):
        yield f"  {line}"


def _memory(plan: Plan) -> Iterator[str]:
    policy = plan.config.train.recompute
    yield f"memory of a rank, train.recompute={policy}"
    parts = plan.memory_bytes
    rows = [
        (name, binary_bytes(parts[name]), words)
        for name, words in CATEGORIES.items()
        if parts[name]
    ]
    for line in columns(rows):
        yield f"  {line}"
    if plan.live_chunks:
        live = ", ".join(map(str, plan.live_chunks))
        yield (
            f"  the same on every pipeline rank: one program runs on all, so each has the slots of "
            f"the rank that needs most; chunks alive at most: {live}"
        )


def _verdict(plan: Plan) -> Iterator[str]:
    total, room = plan.memory_bytes["total"], plan.hardware.usable_bytes
    memory = binary_bytes(plan.hardware.memory_bytes)
    limit = f"{binary_bytes(room)}, {plan.hardware.usable:.0%} of {memory}"
    if plan.fits:
        yield f"fits: {binary_bytes(total)} of {limit}"
        return
    yield f"does not fit: {binary_bytes(total)} of {limit}"
    changes = that_fit(plan.config, plan.hardware)
    if not changes:
        yield "  no single change makes it fit; --search looks at all meshes"
    for change in changes[:3]:
        parts = change.plan.memory_bytes
        yield (
            f"  would fit with {change.overrides}: {binary_bytes(parts['total'])}, "
            f"{seconds(change.plan.step_time_s)} a step instead of {seconds(plan.step_time_s)}"
        )


def _time(plan: Plan) -> Iterator[str]:
    hardware = plan.hardware
    yield (
        f"time of a step: {seconds(plan.step_time_s)}, MFU {plan.mfu:.1%} of "
        f"{hardware.peak_flops / 1e12:,.4g} TFLOP/s, "
        f"{plan.tokens / plan.step_time_s / plan.num_devices:,.0f} tokens/s a device; "
        f"bubble {plan.bubble:.1%}"
    )
    rows = [
        (
            ("> " if name == plan.dominant else "  ") + name,
            seconds(taken),
            f"{taken / plan.step_time_s:.1%}",
            TERMS[name],
        )
        for name, taken in plan.terms.items()
        if taken > 0
    ]
    for line in columns(rows):
        yield f"  {line}"
    yield (
        f"  a sum, nothing hidden: products at {hardware.matmul_efficiency:.0%} of the peak, "
        f"attention at {hardware.attention_efficiency:.0%}, memory and links at "
        f"{hardware.memory_efficiency:.0%} and {hardware.link_efficiency:.0%} of "
        f"{amount(hardware.memory_bytes_per_s)}B/s, {amount(hardware.node_bytes_per_s)}B/s in a "
        f"node, {amount(hardware.network_bytes_per_s)}B/s to others"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's numbers. Units: bytes, seconds, FLOPs."""
    return {
        "total_parameters": plan.total_parameters,
        "active_parameters": plan.active_parameters,
        "flops_per_token": plan.flops_per_token,
        "hardware": plan.hardware.model_dump(),
        "mesh": dict(plan.sizes),
        "tokens_per_step": plan.tokens,
        "microbatches": plan.num_microbatches,
        "fits": plan.fits,
        "usable_bytes": plan.hardware.usable_bytes,
        "memory_bytes": plan.memory_bytes,
        "live_chunks": plan.live_chunks,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "communication": {row.method: row._asdict() for row in plan.methods},
        "bubble": plan.bubble,
        "step_time_s": plan.step_time_s,
        "step_time_terms_s": plan.terms,
        "dominant": plan.dominant,
        "mfu": plan.mfu,
        "changes_that_fit": [
            {"overrides": change.overrides, "step_time_s": change.plan.step_time_s}
            for change in ([] if plan.fits else that_fit(plan.config, plan.hardware))
        ],
    }


def _ranked(ranked: Ranked) -> tuple[str, ...]:
    plan = ranked.plan
    second = sorted(plan.terms, key=lambda name: -plan.terms[name])[:3]
    reason = ", ".join(f"{name} {plan.terms[name] / plan.step_time_s:.0%}" for name in second)
    total = plan.memory_bytes["total"]
    return (
        seconds(plan.step_time_s),
        f"{plan.mfu:.1%}",
        binary_bytes(total),
        reason,
        ranked.candidate.text,
    )


def search_text(found: Found, hardware: str, num_devices: int) -> str:
    """Return the ten fastest that fit with what takes their time, and why others are not there."""
    lines = [
        f"{found.num_candidates} meshes of {num_devices} x {hardware}: {len(found.fitting)} fit, "
        f"{len(found.too_large)} do not, {found.rejected.total()} are refused"
    ]
    if found.fitting:
        head = ("step", "MFU", "memory", "of the time", "")
        rows = [head, *map(_ranked, found.fitting[:SHOWN])]
        lines += [f"  {line}" for line in columns(rows, left=0)]
    if found.too_large:
        least = found.too_large[0]
        total = binary_bytes(least.plan.memory_bytes["total"])
        lines.append(f"too large, at least {total}: {least.candidate.text}")
    lines += [f"refused by {reason}: {count}" for reason, count in found.rejected.most_common()]
    return "\n".join(lines)


def search_json(found: Found) -> dict[str, Any]:
    """Return the search's ranking and counts."""
    return {
        "candidates": found.num_candidates,
        "fitting": [
            {
                "overrides": ranked.candidate.text,
                "step_time_s": ranked.plan.step_time_s,
                "mfu": ranked.plan.mfu,
                "memory_bytes": ranked.plan.memory_bytes["total"],
                "terms_s": ranked.plan.terms,
            }
            for ranked in found.fitting[:SHOWN]
        ],
        "num_fitting": len(found.fitting),
        "num_too_large": len(found.too_large),
        "rejected": dict(found.rejected),
    }
