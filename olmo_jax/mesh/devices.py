"""Devices in an explicit order, the mesh over them, and the table that is printed."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from olmo_jax.config.messages import listing
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES


@runtime_checkable
class Device(Protocol):
    """What the layout needs to know of a jax.Device. Its id is no rank: ids have gaps."""

    platform: str
    process_index: int


def in_order(devices: Sequence[Device]) -> list[Device]:
    """Return the devices by process, each process's own in the order it lists them."""
    return sorted(devices, key=lambda device: device.process_index)


def _check_count(sizes: Mapping[str, int], devices: Sequence[Device]) -> None:
    """A mesh has all devices; on the CPU of one process a smaller one takes the first."""
    wanted, there = math.prod(sizes[axis] for axis in AXES), len(devices)
    num_processes = len({device.process_index for device in devices})
    may_leave_some = devices[0].platform == "cpu" and num_processes == 1
    if wanted == there or (wanted < there and may_leave_some):
        return
    given = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in AXES if sizes[axis] != 1)
    raise UserError(
        f"{given or 'a mesh of size 1 along every axis'} = {wanted} devices, but there are {there} "
        f"{devices[0].platform} devices in {num_processes} process(es) and a mesh has them all; "
        f"use sizes whose product is {there}, or -1 for one axis"
    )


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Device] | None = None) -> Mesh:
    """Return the mesh of all five axes over the devices, rank by rank in process order.

    Raises: UserError if the number of devices differs (a CPU mesh may have fewer than there are).
    """
    devices = jax.devices() if devices is None else devices
    _check_count(sizes, devices)
    shape = [sizes[axis] for axis in AXES]
    # Not jax.make_mesh: it reorders devices and makes Explicit axes. XLA:GPU wants them in order.
    return Mesh(np.array(in_order(devices)[: math.prod(shape)]).reshape(shape), AXES)


def device_table(mesh: Mesh) -> str:
    """Return one line a rank: its coordinates, process and device."""
    cells = [
        (rank, *coordinates, device.process_index, device)
        for rank, (coordinates, device) in enumerate(np.ndenumerate(mesh.devices))
    ]
    heading = ["rank", *map(str, mesh.axis_names), "process", "device"]
    rows = [heading, *([str(cell) for cell in row] for row in cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def expert_group_warning(mesh: Mesh) -> str | None:
    """Return a warning if an expert group's ranks are in several processes, else None.

    Experts exchange rows in every routed layer of every microbatch, sequence ranks twice a layer.
    """
    inner = mesh.shape["expert"] * mesh.shape["sequence"]
    processes = [[d.process_index for d in row] for row in mesh.devices.reshape(-1, inner)]
    crossing = [sorted(set(row)) for row in processes if len(set(row)) > 1]
    if not crossing:
        return None
    local = min(np.bincount([process for row in processes for process in row]).tolist())
    fits = [size for size in range(1, local + 1) if local % size == 0]
    return (
        f"mesh.expert={mesh.shape['expert']} x mesh.sequence={mesh.shape['sequence']}: "
        f"{len(crossing)} of {len(processes)} groups span several processes, the first one "
        f"{listing(crossing[0], 'and')}; their traffic leaves the node unless these share one; "
        f"with {local} devices a process use a product of {listing(fits)}"
    )
