"""A step compiled for GPUs as text and as JSON, beside what the plan says of it."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from olmo_jax.formatting import binary_bytes, columns
from olmo_jax.inspect.gpu_compile import Compiled
from olmo_jax.inspect.gpu_schedule import Transfer
from olmo_jax.mesh.collectives import ring_bytes
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.hardware import MACHINES
from olmo_jax.plan.plan import Plan


class Sort(NamedTuple):
    """Collectives that are alike: of a kind, over groups alike, in the loop of as many turns."""

    kind: str
    groups: str
    times: int | None
    asynchronous: bool


def plan_of(compiled: Compiled) -> Plan:
    """Return the plan of the same config on the same machine."""
    return Plan(Layout(compiled.config, compiled.sizes), MACHINES[compiled.target])


def group_text(transfer: Transfer, num_devices: int) -> str:
    """Return "16 x 8: 0-7": how many groups of how many ranks, and the first one."""
    groups = transfer.collective.groups or (tuple(range(num_devices)),)
    if transfer.collective.kind == "permute":
        return f"{len(groups)} pairs: {groups[0][0]} to {groups[0][1]}"
    first = list(groups[0])
    step = first[1] - first[0] if len(first) > 1 else 1
    if first == list(range(first[0], first[-1] + 1, step)):
        ranks = f"{first[0]}-{first[-1]}" + (f" by {step}" if step > 1 else "")
    else:
        ranks = ",".join(map(str, first[:4])) + (",..." if len(first) > 4 else "")
    return f"{len(groups)} x {len(first)}: {ranks}"


def by_sort(transfers: Iterable[Transfer], num_devices: int) -> dict[Sort, list[Transfer]]:
    """Return the transfers by sort, those with most bytes a step first."""
    found: dict[Sort, list[Transfer]] = {}
    for each in transfers:
        groups = group_text(each, num_devices)
        key = Sort(each.collective.kind, groups, each.times, each.asynchronous)
        found.setdefault(key, []).append(each)
    return dict(sorted(found.items(), key=lambda item: -_bytes(item[1])))


def _bytes(transfers: Iterable[Transfer]) -> int:
    """Return what a rank puts in, all times of a step together."""
    return sum(each.collective.operand_bytes * (each.times or 1) for each in transfers)


def sent_bytes(compiled: Compiled) -> float:
    """Return what one rank sends in a step by rings, as the plan counts it; a permute sends all."""
    total = 0.0
    for each in compiled.transfers:
        kind, groups = each.collective.kind, each.collective.groups
        ranks = len(groups[0]) if groups else _num_devices(compiled)
        total += ring_bytes(kind, each.collective.operand_bytes * (each.times or 1), ranks)
    return total


def _num_devices(compiled: Compiled) -> int:
    return math.prod(compiled.sizes.values())


def _difference(found: float, planned: float) -> str:
    return f"{found / planned - 1:+.1%}" if planned else "-"


def text(compiled: Compiled) -> str:
    """Return the report."""
    parts = (_facts, _memory, _collectives, _host)
    return "\n\n".join("\n".join(part(compiled)) for part in parts)


def _facts(compiled: Compiled) -> Iterator[str]:
    used = " x ".join(f"{axis}={n}" for axis, n in compiled.sizes.items() if n > 1)
    yield (
        f"compiled for {_num_devices(compiled)} x {compiled.target}{used and ': '}{used}; traced "
        f"in {compiled.trace_s:.0f} s, compiled in {compiled.compile_s:.0f} s; nothing ran"
    )
    known = ", ".join(f"{name} in {places} places" for name, places in compiled.backends.items())
    yield f"backends: {known or 'XLA alone'}"


def _memory(compiled: Compiled) -> Iterator[str]:
    plan = plan_of(compiled)
    planned = plan.memory_bytes
    yield "memory of a device: as compiled, as planned"
    rows = [
        ("state", compiled.alias_bytes, plan.persistent.state),
        ("peak", compiled.peak_bytes, planned["total"]),
    ]
    cells = [
        (name, binary_bytes(a), binary_bytes(b), f"{_difference(b, a)} planned")
        for name, a, b in rows
    ]
    yield from (f"  {line}" for line in columns(cells))
    arguments, temporary = compiled.argument_bytes, compiled.temporary_bytes
    yield f"  arguments {binary_bytes(arguments)}, temporary {binary_bytes(temporary)}"


def _collectives(compiled: Compiled) -> Iterator[str]:
    plan = plan_of(compiled)
    planned, found = sum(t.sent_bytes for t in plan.communication), sent_bytes(compiled)
    yield (
        f"collectives: a rank sends {binary_bytes(found)} a step by rings; "
        f"planned {binary_bytes(planned)} ({_difference(planned, found)})"
    )
    head = ("kind", "bytes in", "times", "groups", "places", "beside it: products of kernels")
    rows: list[tuple[str, ...]] = [head]
    for sort, places in by_sort(compiled.transfers, _num_devices(compiled)).items():
        beside = "synchronous"
        if sort.asynchronous:
            beside = ", ".join(f"{each.products} of {each.kernels}" for each in places[:6])
            beside += ", ..." if len(places) > 6 else ""
        rows.append(
            (
                sort.kind,
                binary_bytes(_bytes(places)),
                "?" if sort.times is None else str(sort.times),
                sort.groups,
                str(len(places)),
                beside,
            )
        )
    yield from (f"  {line}" for line in columns(rows))


def _host(compiled: Compiled) -> Iterator[str]:
    waits = compiled.host_waits
    yield "host waits: " + (", ".join(waits[:8]) if waits else "none")


def as_json(compiled: Compiled) -> dict[str, Any]:
    """Return the numbers of the report."""
    plan, num_devices = plan_of(compiled), _num_devices(compiled)
    return {
        "target": compiled.target,
        "mesh": compiled.sizes,
        "backends": compiled.backends,
        "trace_s": compiled.trace_s,
        "compile_s": compiled.compile_s,
        "memory_bytes": {
            "state": compiled.alias_bytes,
            "arguments": compiled.argument_bytes,
            "temporary": compiled.temporary_bytes,
            "peak": compiled.peak_bytes,
        },
        "planned_memory_bytes": {
            "state": plan.persistent.state,
            "peak": plan.memory_bytes["total"],
        },
        "sent_bytes": sent_bytes(compiled),
        "planned_sent_bytes": sum(t.sent_bytes for t in plan.communication),
        "collectives": [
            {
                **sort._asdict(),
                "operand_bytes": _bytes(places),
                "places": len(places),
                "products_beside": [each.products for each in places],
            }
            for sort, places in by_sort(compiled.transfers, num_devices).items()
        ],
        "host_waits": compiled.host_waits,
    }
