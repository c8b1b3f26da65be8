"""Leaves out of a checkpoint: strict, checked against their checksums, on whatever mesh asks."""

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from olmo_jax.checkpoint import disk_errors, folders
from olmo_jax.checkpoint.checksum import Checksum, block_checksum, checksums_of
from olmo_jax.checkpoint.folders import STATE
from olmo_jax.checkpoint.leaves import Key, blocks, flat, nested
from olmo_jax.checkpoint.manifest import Leaf, Saved
from olmo_jax.config.messages import listing, show
from olmo_jax.config.records import Config
from olmo_jax.errors import UserError

BLOCK_ELEMENTS = 1 << 24
"""Of what is read block by block, one block: 64 MiB."""

_NAMED = 4


def check_leaves(
    saved: Saved, wanted: Mapping[Key, Any], roles: tuple[str, ...], config: Config | None
) -> None:
    """Compare a checkpoint's leaves of some roles with the wanted ones: names, shapes, dtypes.

    Raises: UserError that names the first leaf that differs, and the keys that may be why.
    """
    there = {key: leaf for key, leaf in saved.leaves.items() if key.role in roles}
    found = {key: f"{leaf.dtype}{list(leaf.shape)}" for key, leaf in there.items()}
    asked = {key: f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}" for key, leaf in wanted.items()}
    differing = [key for key in sorted({*found, *asked}) if found.get(key) != asked.get(key)]
    if not differing:
        return
    key = differing[0]
    if key not in found:
        what = f"{saved.folder} lacks {key}, which the model has as {asked[key]}"
    elif key not in asked:
        what = f"{saved.folder} has {key} as {found[key]}, which the model lacks"
    else:
        what = f"{saved.folder} has {key} as {found[key]}, the model as {asked[key]}"
    raise UserError(
        f"{what} ({len(differing)} leaves differ); a checkpoint fits only the model that it was "
        f"saved from; {_advice(saved, config)}"
    )


def _advice(saved: Saved, config: Config | None) -> str:
    differing = [] if config is None else _differing_keys(saved.config, config)
    if not differing:
        return "use the config.yaml of its run"
    return f"write {listing(differing[:_NAMED], 'and')}, as its run has it"


def _differing_keys(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Return the model's keys that differ, as its run has them, sizes before anything else."""
    there, here = (
        dict(_dotted(tree, "model."))
        for tree in (saved.get("model", {}), config.model.model_dump(mode="json"))
    )
    keys = [key for key in there if key != "model.dtype" and there[key] != here.get(key)]
    keys.sort(key=lambda key: isinstance(there[key], bool) or not isinstance(there[key], int))
    return [f"{key}={show(there[key])}" for key in keys]


def _dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read(saved: Saved, wanted: Mapping[Key, jax.ShapeDtypeStruct]) -> dict[Key, jax.Array]:
    """Return the wanted leaves in their shardings, each as it was written.

    Every process reads what its own devices hold, and nothing twice.

    Raises: UserError naming a leaf that cannot be read, or that differs from its checksum.
    """
    # The sums are taken on the devices, of what a step would use, on whatever mesh it lies.
    found = _read(saved, wanted)
    checksums = checksums_of(found)
    for key in wanted:
        if checksums[key] != saved.leaves[key].checksum:
            raise damaged(saved, key, "its checksum differs")
    return found


def _read(saved: Saved, wanted: Mapping[Key, jax.ShapeDtypeStruct]) -> dict[Key, jax.Array]:
    try:
        with disk_errors.without_tracebacks():
            return _restored(saved, wanted)
    except Exception as error:  # Orbax and TensorStore raise all kinds
        key = _unreadable(saved, wanted)
        if key is None:
            raise UserError(
                f"{saved.folder} cannot be read: {disk_errors.short(error)}; a folder that was "
                f"written to its end can; {folders.way_on(saved.folder)}"
            ) from error
        raise damaged(saved, key, "it cannot be read") from error


def _restored(saved: Saved, wanted: Mapping[Key, jax.ShapeDtypeStruct]) -> dict[Key, jax.Array]:
    arguments = {
        key: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
        )
        for key, leaf in wanted.items()
    }
    request = ocp.args.PyTreeRestore(
        nested(wanted), restore_args=nested(arguments), partial_restore=True
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(saved.folder, args=ocp.args.Composite(**{STATE: request}))
    leaves = flat(found[STATE])
    for key in wanted:
        if not isinstance(leaves.get(key), jax.Array):
            raise ValueError(f"Orbax's metadata has {key} as no array")
    return {key: leaves[key] for key in wanted}


def damaged(saved: Saved, key: Key, why: str) -> UserError:
    """Return the error for a leaf that is not as it was written."""
    return UserError(
        f"{key} in {saved.folder} is damaged ({why}); a leaf is used only as it was written; "
        f"{folders.way_on(saved.folder)}"
    )


def check_metadata(saved: Saved) -> None:
    """Compare what Orbax keeps of the leaves with the manifest, and let it restore the smallest.

    Raises: UserError if Orbax could not restore the checkpoint.
    """
    with warnings.catch_warnings():
        # Orbax leaves coroutines that it made for other leaves.
        warnings.simplefilter("ignore", RuntimeWarning)
        why = _fault_of_metadata(saved)
    if why is not None:
        raise UserError(
            f"Orbax's metadata is damaged in {saved.folder} ({why}); a checkpoint is used only as "
            f"it was written; {folders.way_on(saved.folder)}"
        )


def _fault_of_metadata(saved: Saved) -> str | None:
    smallest = min(saved.leaves, key=lambda key: math.prod(saved.leaves[key].shape))
    leaf = saved.leaves[smallest]
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {smallest: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)}
    try:
        with disk_errors.without_tracebacks():
            found = _kept(saved.folder)
            _restored(saved, wanted)
    except Exception as error:  # noqa: BLE001 Orbax raises all kinds; told above, once it is freed
        return disk_errors.short(error)
    there = {key: (leaf.shape, leaf.dtype) for key, leaf in saved.leaves.items()}
    differing = [key for key in sorted({*found, *there}) if found.get(key) != there.get(key)]
    return f"{len(differing)} leaves differ, {differing[0]} first" if differing else None


def _kept(folder: epath.Path) -> dict[Key, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of the leaves as Orbax restores them."""
    metadata = ocp.PyTreeCheckpointHandler().metadata(folder / STATE)
    return {
        key: (tuple(leaf.shape), str(np.dtype(leaf.dtype)))
        for key, leaf in flat(metadata.tree).items()
    }


def _unreadable(saved: Saved, wanted: Mapping[Key, Any]) -> Key | None:
    """Return the first leaf that TensorStore cannot read alone, None if it can read all."""
    for key in wanted:
        try:
            for _ in blocks_of(saved.folder, key, saved.leaves[key]):
                pass
        except ValueError:
            return key
    return None


def blocks_of(
    folder: epath.Path, key: Key, leaf: Leaf, num_elements: int = BLOCK_ELEMENTS
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield a leaf's blocks and where each begins, one block at a time in memory.

    Raises: ValueError if the leaf cannot be read, or has another shape or dtype.
    """
    array = _open(folder, key)
    if array.shape != leaf.shape or array.dtype.numpy_dtype != np.dtype(leaf.dtype):
        raise ValueError(f"{key} is {array.dtype.name}{list(array.shape)}")
    for block in blocks(leaf.shape, num_elements):
        yield tuple(part.start for part in block), np.asarray(array[block].read().result())


def _open(folder: epath.Path, key: Key) -> Any:
    """Open a leaf where Orbax keeps it: a zarr array in the folder's OCDBT database."""
    place = os.fspath(folder / STATE)
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            # In a URL some characters of a path would have a meaning.
            "base": place if "://" in place else {"driver": "file", "path": f"{place}/"},
            "path": f"{key.role}.{key.name}/",
        },
        # What is read once is not worth keeping.
        "context": {"cache_pool": {"total_bytes_limit": 0}},
    }
    return tensorstore.open(spec, open=True, read=True).result()


def checksum_of(saved: Saved, key: Key, num_elements: int = BLOCK_ELEMENTS) -> str:
    """Return the checksum of a leaf as it lies on the disk, read block by block.

    Raises: ValueError if it cannot be read.
    """
    # Sums of blocks add up to those of the leaf: each element's key is its index in the whole leaf.
    first = second = 0
    for start, block in blocks_of(saved.folder, key, saved.leaves[key], num_elements):
        sums = block_checksum(jnp.asarray(block), start)
        first, second = first + int(sums.first), second + int(sums.second)
    return Checksum(first % 2**32, second % 2**32).text()
