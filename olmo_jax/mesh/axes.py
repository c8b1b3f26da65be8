"""The five mesh axes, their sizes, and the two views of the same ranks. No jax."""

import math
from collections.abc import Iterator, Mapping

from olmo_jax.config.messages import divisors, listing
from olmo_jax.config.records import MeshConfig
from olmo_jax.errors import UserError

AXES = ("pipeline", "data", "fsdp", "expert", "sequence")
"""Every mesh has all of them, slowest first: rank order is row-major over their sizes."""

DENSE_DATA_AXES = ("data", "fsdp", "expert")
"""The axes that divide the rows of the batch, for all but the routed experts."""

TOKEN_AXES = (*DENSE_DATA_AXES, "sequence")
"""The axes that divide the batch, by rows and by positions."""

EMULATED_DEVICES = 8
"""How many devices an emulated mesh has in all when one axis is left open."""


def open_axes(mesh: MeshConfig) -> Iterator[str]:
    """Yield a message if more than one axis is left open."""
    free = [f"mesh.{axis}=-1" for axis, size in mesh if size == -1]
    if len(free) > 1:
        yield (
            f"{listing(free, 'and')} leave {len(free)} sizes open, and at most 1 can be "
            "inferred; give the size of the others (1 if unused)"
        )


def num_devices_wanted(mesh: MeshConfig) -> int:
    """Return how many devices to emulate for `mesh`: an axis of -1 makes 8 in all."""
    sizes = [size for _, size in mesh]
    return EMULATED_DEVICES if -1 in sizes else math.prod(sizes)


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)


def _open_size(axis: str, fixed: Mapping[str, int], num_devices: int) -> int:
    taken = math.prod(fixed.values())
    if num_devices % taken:
        raise UserError(
            f"mesh.{axis}=-1 cannot be inferred: {_sizes_text(fixed)} = {taken} does not divide "
            f"the {num_devices} devices; use other sizes whose product is "
            f"{listing(divisors(num_devices))}"
        )
    return num_devices // taken


def resolve(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the size of every axis, an open one inferred from the number of devices.

    Raises: UserError if the sizes do not divide the devices, or need more of them.
    """
    for message in open_axes(mesh):
        raise UserError(message)
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    for axis in sizes.keys() - fixed.keys():
        sizes[axis] = _open_size(axis, fixed, num_devices)
    if (wanted := math.prod(sizes.values())) > num_devices:
        raise UserError(
            f"{_sizes_text(sizes)} = {wanted} devices, but there are {num_devices}; use sizes "
            f"whose product is {num_devices}, or -1 for one axis"
        )
    return sizes


def expert_model_axes(*, fold_sequence: bool = False) -> tuple[str, ...]:
    """Return the axes of the expert view that split experts (EP-MP)."""
    return ("expert", "sequence") if fold_sequence else ("expert",)


def num_expert_ranks(sizes: Mapping[str, int], *, fold_sequence: bool = False) -> int:
    """Return the ranks that hold one copy of the experts between them."""
    return math.prod(sizes[axis] for axis in expert_model_axes(fold_sequence=fold_sequence))
