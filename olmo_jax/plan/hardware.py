"""Machines: peak, memory and links of one device, and what part of each a program gets. No jax."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from olmo_jax.config import document
from olmo_jax.config.messages import listing, show
from olmo_jax.config.records import Count, Fraction, Name, Positive, Record
from olmo_jax.errors import UserError
from olmo_jax.formatting import GIB, MIB
from olmo_jax.mesh.axes import AXES


class Hardware(Record, frozen=True):
    """One device of a cluster; rates are what its data sheet says, each in one direction.

    `peak_flops` is dense bf16.

    `node_bytes_per_s` is the link to the devices of the same node, `network_bytes_per_s` this
    device's share of the links to other nodes. The efficiencies are the parts of the rates that a
    plan counts on; `usable` the part of memory that a program may fill.
    """

    name: Name
    peak_flops: Positive
    memory_bytes: Count | Positive
    memory_bytes_per_s: Positive
    devices_per_node: Count = 8
    node_bytes_per_s: Positive
    network_bytes_per_s: Positive
    usable: Fraction = 0.92
    matmul_efficiency: Fraction = 0.6
    attention_efficiency: Fraction = 0.5
    memory_efficiency: Fraction = 0.8
    link_efficiency: Fraction = 0.8
    latency_s: Positive = 2e-5

    @property
    def usable_bytes(self) -> int:
        return int(self.usable * self.memory_bytes)


MACHINES = {
    machine.name: machine
    for machine in (
        # A100 80 GB SXM: 12 NVLink 3 links of 25 GB/s; one 200 Gb/s adapter a GPU.
        Hardware(
            name="a100",
            peak_flops=312e12,
            memory_bytes=80 * GIB,
            memory_bytes_per_s=2.039e12,
            node_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
        ),
        # H100 80 GB SXM: 18 NVLink 4 links of 25 GB/s; one 400 Gb/s adapter a GPU.
        Hardware(
            name="h100",
            peak_flops=989.5e12,
            memory_bytes=81_559 * MIB,
            memory_bytes_per_s=3.35e12,
            node_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
        ),
        Hardware(
            name="h200",
            peak_flops=989.5e12,
            memory_bytes=143_771 * MIB,
            memory_bytes_per_s=4.8e12,
            node_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
        ),
        # 18 NVLink 5 links of 50 GB/s; one 400 Gb/s adapter a GPU.
        Hardware(
            name="b200",
            peak_flops=2.25e15,
            memory_bytes=183_359 * MIB,
            memory_bytes_per_s=8e12,
            node_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
        ),
        # The report's machine: 275,040 MiB, 18 links of 53.125 GB/s, one 800 Gb/s adapter a GPU.
        Hardware(
            name="b300",
            peak_flops=2.25e15,
            memory_bytes=275_040 * MIB,
            memory_bytes_per_s=8e12,
            node_bytes_per_s=956.25e9,
            network_bytes_per_s=100e9,
        ),
    )
}
"""By name. Source: NVIDIA's data sheets, memory as nvidia-smi shows it."""


def machine(text: str) -> Hardware:
    """Return the machine of that name, or the one that a YAML file describes.

    Raises: UserError for a name that is neither, and for a key or value that is wrong.
    """
    if text in MACHINES:
        return MACHINES[text]
    path = Path(text)
    if not path.exists():
        raise UserError(
            f"--hardware {text} is no machine known here and no file; use "
            f"{listing(tuple(MACHINES))}, or a YAML file with {listing(_required(), 'and')}"
        )
    tree = document.parse(path.read_text(encoding="utf-8"), text)
    try:
        return Hardware.model_validate(tree)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"])) or "the file"
        raise UserError(
            f"--hardware {text}: {key}={show(detail['input'])[:40]} is refused ({detail['msg']}); "
            f"write {listing(_required(), 'and')}, and any of {listing(_optional())}"
        ) from None


def _required() -> list[str]:
    return [name for name, field in Hardware.model_fields.items() if field.is_required()]


def _optional() -> list[str]:
    return [name for name, field in Hardware.model_fields.items() if not field.is_required()]


def in_one_node(hardware: Hardware, axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return how many ranks of one group along `axes` share a node: ranks fill nodes in order."""
    # Ranks are row-major over the axes: along the last one they are neighbours, along an earlier
    # one as far apart as the product of the sizes behind it. These are the ranks of rank 0's group;
    # those below devices_per_node are in its node.
    strides = {axis: math.prod(sizes[a] for a in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    ranks = np.zeros(1, np.int64)
    for axis in axes:
        ranks = (ranks[:, None] + strides[axis] * np.arange(sizes[axis])).reshape(-1)
    return int((ranks < hardware.devices_per_node).sum())


def link(hardware: Hardware, axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Return "node" if a group along `axes` stays in one, else "network"."""
    ranks = math.prod(sizes[axis] for axis in axes)
    return "node" if in_one_node(hardware, axes, sizes) == ranks else "network"


def bytes_per_s(hardware: Hardware, axes: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Return the rate at which one rank of a group along `axes` sends.

    Where a group leaves the node, each of its ranks there has an adapter and the ring uses all: g
    of them send as fast as g adapters, and no faster than the node's links.
    """
    rate = hardware.node_bytes_per_s
    if link(hardware, axes, sizes) == "network":
        rate = min(rate, in_one_node(hardware, axes, sizes) * hardware.network_bytes_per_s)
    return hardware.link_efficiency * rate
