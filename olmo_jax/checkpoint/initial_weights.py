"""Where a run's first weights come from: another run, or a Hugging Face folder."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from olmo_jax.arch.parameters import parameters
from olmo_jax.checkpoint import folders, identity, reading
from olmo_jax.checkpoint.checkpoints import read_saved
from olmo_jax.checkpoint.checksum import examined
from olmo_jax.checkpoint.leaves import WEIGHTS, Key, flat, nested, opt_state_of, stored
from olmo_jax.checkpoint.manifest import Saved
from olmo_jax.checkpoint.protocols import Leaves, Program
from olmo_jax.config.messages import some
from olmo_jax.config.records import Config
from olmo_jax.errors import UserError
from olmo_jax.file_names import TOKENIZER
from olmo_jax.interop import files, huggingface
from olmo_jax.interop.expressible import exchanged
from olmo_jax.interop.olmo3moe_config import model_config


def refuse_start(
    program: Program[Any], facts: Mapping[str, str] | None = None, allowed: Collection[str] = ()
) -> list[str]:
    """Refuse a source of first weights that cannot give what `program` asks; no array is read.

    `facts` are those of the data that the run trains on. Returns what is another's than the
    source's and was allowed, by "model" or "tokenizer", a line each.

    Raises: UserError if `checkpoint.init_from` is not there, is the run itself, has a leaf missing,
        too much or of another shape, or if its model or tokenizer is another one.
    """
    config = program.config
    source = config.checkpoint.init_from
    if source is None:
        return []
    folder, run_dir = _folder(source), Path(config.run_dir).resolve()
    if run_dir in (resolved := Path(source).resolve(), *resolved.parents):
        raise UserError(
            f"checkpoint.init_from={source} is in run_dir={config.run_dir}; a run resumes in its "
            "own folder by itself, and starts from the weights of another; write null, or another "
            "run_dir"
        )
    if _is_huggingface(folder):
        return _refuse_huggingface(Path(folder), program, facts or {}, allowed)
    saved = read_saved(source)
    reading.check_leaves(saved, _wanted(program), _roles(program), config)
    changes = identity.refuse_other_model(
        saved.folder, identity.model_of(saved), config.model, allowed
    )
    there = identity.tokenizer_of(saved)
    other = identity.refuse_other_tokenizer(saved.folder, there, facts or {}, allowed)
    return [f"{saved.folder}: {text}" for text in [*map(str, changes), *other]]


def source_of_weights(config: Config, facts: Mapping[str, str]) -> Saved | None:
    """Return the checkpoint of `checkpoint.init_from` if it was trained on the data of `facts`."""
    source = config.checkpoint.init_from
    if source is None or _is_huggingface(_folder(source)):
        return None
    saved = read_saved(source)
    return saved if saved.facts.get("data") == facts["data"] else None


def _refuse_huggingface(
    folder: Path, program: Program[Any], facts: Mapping[str, str], allowed: Collection[str]
) -> list[str]:
    """Refuse a Hugging Face folder as `refuse_start` does."""
    _refuse_moments(folder, program)
    try:
        model = model_config(files.read_config(folder))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    _check(folder, parameters(model), program)
    changes = identity.refuse_other_model(folder, model, exchanged(program.config.model), allowed)
    there = identity.digests_of_tokenizer(folder / TOKENIZER)
    other = identity.refuse_other_tokenizer(folder, there, facts, allowed)
    return [f"{folder}: {text}" for text in [*map(str, changes), *other]]


def initial_weights(
    path: str | os.PathLike[str], program: Program[Any]
) -> tuple[Leaves, Leaves, Any]:
    """Return main weights, expert biases and optimizer's state (None unless asked for) of `path`.

    A run folder gives its last checkpoint, or the one that `path` is; a Hugging Face folder has
    neither moments nor expert biases, which then start at zero.

    Raises: UserError if `path` is neither, or if a leaf is missing, too much or of another shape.
    """
    folder = _folder(path)
    if _is_huggingface(folder):
        return _from_huggingface(Path(folder), program)
    saved, wanted = read_saved(path), _wanted(program)
    reading.check_leaves(saved, wanted, _roles(program), program.config)
    leaves = reading.read(saved, wanted)
    _refuse_nonfinite(path, leaves)
    tree = nested(leaves)
    main, expert_bias = tree["main"], tree.get("router_bias", {})
    if not program.config.checkpoint.init_moments:
        return main, expert_bias, None
    return main, expert_bias, opt_state_of(tree, program.abstract_stored())


def _folder(path: str | os.PathLike[str]) -> epath.Path:
    folder = folders.path_of(path)
    if not folder.exists():
        raise UserError(
            f"checkpoint.init_from={os.fspath(path)} is not there; a run folder or a Hugging Face "
            "folder is needed; write the path of one, or null"
        )
    return folder


def _is_huggingface(folder: epath.Path) -> bool:
    return (folder / files.CONFIG).exists()


def _roles(program: Program[Any]) -> tuple[str, ...]:
    """Return the roles of the leaves that are read: all but the history, or the weights alone."""
    if not program.config.checkpoint.init_moments:
        return WEIGHTS
    return (*WEIGHTS, *(role for role in stored(program.abstract_stored()) if role != "history"))


def _wanted(program: Program[Any]) -> dict[Key, Any]:
    """Return the leaves that are read of another run, as `program` lays them out."""
    leaves, roles = flat(stored(program.abstract_stored())), _roles(program)
    return {key: leaf for key, leaf in leaves.items() if key.role in roles}


def _refuse_moments(folder: os.PathLike[str], program: Program[Any]) -> None:
    if program.config.checkpoint.init_moments:
        raise UserError(
            f"checkpoint.init_moments=true, but checkpoint.init_from={os.fspath(folder)} is a "
            "Hugging Face folder, and these hold no moments; write checkpoint.init_moments=false, "
            "or name a run folder"
        )


def _from_huggingface(folder: Path, program: Program[Any]) -> tuple[Leaves, Leaves, None]:
    _refuse_moments(folder, program)
    _, params = huggingface.load(folder)
    _check(folder, params, program)
    like = program.abstract_stored()
    main = {name: _put(np.asarray(params[name]), leaf) for name, leaf in like.main.items()}
    _refuse_nonfinite(folder, main)
    expert_bias = {
        name: _put(np.asarray(params.get(name, np.zeros(leaf.shape, leaf.dtype))), leaf)
        for name, leaf in like.expert_bias.items()
    }
    return main, expert_bias, None


def _check(folder: os.PathLike[str], found: Mapping[str, Any], program: Program[Any]) -> None:
    """Compare a folder's leaves, arrays or shapes, with the program's."""
    like = program.abstract_stored()
    there = {name: list(leaf.shape) for name, leaf in found.items()}
    asked = {name: list(leaf.shape) for name, leaf in like.main.items()}
    # An expert bias that the folder lacks starts at zero.
    asked |= {n: list(leaf.shape) for n, leaf in like.expert_bias.items() if n in there}
    differing = sorted(name for name in {*there, *asked} if there.get(name) != asked.get(name))
    if differing:
        name = differing[0]
        raise UserError(
            f"checkpoint.init_from={os.fspath(folder)} has {name} as {there.get(name, 'no leaf')}, "
            f"the model as {asked.get(name, 'no leaf')} ({len(differing)} leaves differ); weights "
            "fit only a model of the same shapes; write model.* as that folder's config.json has it"
        )


def _refuse_nonfinite(source: str | os.PathLike[str], leaves: Mapping[Any, jax.Array]) -> None:
    """Refuse first weights or moments from which no step can be taken.

    Raises: UserError that names the first leaves.
    """
    _, found = examined({key: leaf for key, leaf in leaves.items() if _is_float(leaf)})
    if found:
        raise UserError(
            f"checkpoint.init_from={os.fspath(source)} holds numbers that are not finite in "
            f"{some(found, 4)}; a run starts from finite weights; name "
            "another folder, or an earlier checkpoint of that run"
        )


def _is_float(leaf: jax.Array) -> bool:
    return np.issubdtype(leaf.dtype, np.floating)


def _put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Place a leaf. Copies: the first step gives its buffers away."""
    return jax.make_array_from_callback(
        value.shape, like.sharding, lambda index: np.array(value[index], like.dtype)
    )
