"""Where a run's first weights come from: another run, or a Hugging Face folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from olmo_jax.checkpoint import folders, reading
from olmo_jax.checkpoint.leaves import WEIGHTS, flat, nested, stored
from olmo_jax.checkpoint.run import read_saved
from olmo_jax.errors import UserError
from olmo_jax.interop import files, huggingface

Leaves = dict[str, Any]


def initial_weights(
    path: str | os.PathLike[str], program: Any
) -> tuple[Leaves, Leaves, Leaves | None]:
    """Return main weights, router bias and moments (None unless asked for) from `path`.

    A run folder gives its last checkpoint, or the one that `path` is; a Hugging Face folder has
    neither moments nor router bias, which then starts at zero.

    Raises: UserError if `path` is neither, or if a leaf is missing, too much or of another shape.
    """
    if _is_huggingface(path):
        return _from_huggingface(Path(path), program)
    saved = read_saved(path)
    config = program.config
    roles = (*WEIGHTS, "mu", "nu", "counters") if config.checkpoint.init_moments else WEIGHTS
    wanted = {
        key: leaf
        for key, leaf in flat(stored(program.abstract_arguments()[0])).items()
        if key.role in roles
    }
    reading.check_leaves(saved, wanted, roles, config)
    tree = nested(reading.read(saved, wanted))
    main, router_bias = tree["main"], tree.get("router_bias", {})
    if not config.checkpoint.init_moments:
        return main, router_bias, None
    count = tree["counters"]["moments"]
    return main, router_bias, {"mu": tree["mu"], "nu": tree["nu"], "count": count}


def _is_huggingface(path: str | os.PathLike[str]) -> bool:
    folder = folders.path_of(path)
    if not folder.exists():
        raise UserError(
            f"checkpoint.init_from={os.fspath(path)} is not there; a run folder or a Hugging Face "
            "folder is needed; write the path of one, or null"
        )
    return (folder / files.CONFIG).exists()


def _from_huggingface(folder: Path, program: Any) -> tuple[Leaves, Leaves, None]:
    if program.config.checkpoint.init_moments:
        raise UserError(
            f"checkpoint.init_moments=true, but checkpoint.init_from={folder} is a Hugging Face "
            "folder, and these hold no moments; write checkpoint.init_moments=false, or name a "
            "run folder"
        )
    _, params = huggingface.load(folder)
    like = program.abstract_arguments()[0]
    asked = {
        **like.main,
        **{name: leaf for name, leaf in like.router_bias.items() if name in params},
    }
    _check(folder, params, asked)
    main = {name: _put(np.asarray(params[name]), leaf) for name, leaf in like.main.items()}
    router_bias = {
        name: _put(np.asarray(params.get(name, np.zeros(leaf.shape, leaf.dtype))), leaf)
        for name, leaf in like.router_bias.items()
    }
    return main, router_bias, None


def _check(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    there = {name: list(leaf.shape) for name, leaf in found.items()}
    asked = {name: list(leaf.shape) for name, leaf in wanted.items()}
    differing = sorted(name for name in {*there, *asked} if there.get(name) != asked.get(name))
    if differing:
        name = differing[0]
        raise UserError(
            f"checkpoint.init_from={folder} has {name} as {there.get(name, 'no leaf')}, the model "
            f"as {asked.get(name, 'no leaf')} ({len(differing)} leaves differ); weights fit only a "
            "model of the same shapes; write model.* as that folder's config.json has it"
        )


def _put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Place a leaf. Copies: the first step gives its buffers away."""
    return jax.make_array_from_callback(
        value.shape, like.sharding, lambda index: np.array(value[index], like.dtype)
    )
