"""What checkpoint.init_from names, looked at before anything is compiled; no array is read."""

from pathlib import Path
from typing import Any

from olmo_jax.checkpoint import folders, read_saved, reading
from olmo_jax.checkpoint.leaves import WEIGHTS, flat, stored
from olmo_jax.errors import UserError
from olmo_jax.interop import files
from olmo_jax.interop.olmo3moe import model_config
from olmo_jax.plan.parameters import parameter_shapes


def refuse_start(program: Any) -> None:
    """Refuse a source that is not there, is the run itself, or has not what the program asks for.

    Raises: UserError.
    """
    config = program.config
    source, run_dir = config.checkpoint.init_from, Path(config.run_dir).resolve()
    if source is None:
        return
    folder = folders.path_of(source)
    if not folder.exists():
        raise UserError(
            f"checkpoint.init_from={source} is not there; a run folder or a Hugging Face folder "
            "is needed; write the path of one, or null"
        )
    if run_dir in (resolved := Path(source).resolve(), *resolved.parents):
        raise UserError(
            f"checkpoint.init_from={source} is in run_dir={config.run_dir}; a run goes on in its "
            "own folder by itself, and starts from the weights of another; write null, or another "
            "run_dir"
        )
    if (folder / files.CONFIG).exists():
        _refuse_huggingface(Path(folder), program)
    else:
        _refuse_run(source, program)


def _refuse_run(source: str, program: Any) -> None:
    moments = ("mu", "nu", "counters") if program.config.checkpoint.init_moments else ()
    roles = (*WEIGHTS, *moments)
    leaves = flat(stored(program.abstract_arguments()[0]))
    wanted = {key: leaf for key, leaf in leaves.items() if key.role in roles}
    reading.check_leaves(read_saved(source), wanted, roles, program.config)


def _refuse_huggingface(folder: Path, program: Any) -> None:
    if program.config.checkpoint.init_moments:
        raise UserError(
            f"checkpoint.init_moments=true, but checkpoint.init_from={folder} is a Hugging Face "
            "folder, and these hold no moments; write checkpoint.init_moments=false, or name a "
            "run folder"
        )
    try:
        shapes = parameter_shapes(model_config(files.read_config(folder)))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    found = {name: tuple(leaf.shape) for name, leaf in shapes.items()}
    state = program.abstract_arguments()[0]
    wanted = {name: tuple(leaf.shape) for name, leaf in state.main.items()}
    # A model that has no selection bias starts with one of zeros.
    other = sorted(
        name
        for name in {*found, *wanted} - {*state.router_bias}
        if found.get(name) != wanted.get(name)
    )
    if other:
        raise UserError(
            f"checkpoint.init_from={folder} has {other[0]} as {found.get(other[0], 'no leaf')}, "
            f"the model as {wanted.get(other[0], 'no leaf')} ({len(other)} leaves differ); weights "
            "fit only a model of the same shapes; write model.* as that folder's config.json has it"
        )
