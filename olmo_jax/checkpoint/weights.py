"""The weights that a run leaves: FP32 leaves by their logical names, laid out by no mesh."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from olmo_jax.errors import UserError
from olmo_jax.model.transformer import Params

_FOLDER = "checkpoints"


def save(run_dir: Path, step: int, params: Params) -> Path:
    """Write the leaves of `params`, each process its shards, and return the folder.

    The folder gets its name when it is whole: a killed writer leaves none.
    """
    folder = run_dir.absolute() / _FOLDER / f"step_{step}"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, params)
    return folder


def latest(run_dir: Path) -> Path:
    """Return the folder of the last step that was written.

    Raises: UserError if the run has none.
    """
    folders = (run_dir / _FOLDER).glob("step_*")
    whole = [path for path in folders if path.name.removeprefix("step_").isdigit()]
    if not whole:
        raise UserError(
            f"{run_dir} holds no weights: {run_dir / _FOLDER} has no step_<number> folder; "
            "a run writes one when it ends or is stopped; name the folder of such a run"
        )
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")))


def restore(run_dir: Path, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read the last step's leaves into the shapes and shardings of `shapes`, as FP32.

    Raises: UserError naming a leaf that is missing, not asked for, or of another shape.
    """
    folder = latest(run_dir).absolute()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(folder).item_metadata
            leaves = {} if found is None else dict(found.tree)
            _check_leaves(
                folder, {name: tuple(leaf.shape) for name, leaf in leaves.items()}, shapes
            )
            return checkpointer.restore(folder, shapes)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{folder} cannot be read ({error}); a folder that was written to its end can; "
            "name a run whose folder is whole, or train again"
        ) from error


def _check_leaves(
    folder: Path, found: dict[str, tuple[int, ...]], shapes: dict[str, jax.ShapeDtypeStruct]
) -> None:
    wanted = {name: tuple(leaf.shape) for name, leaf in shapes.items()}
    differing = sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )
    if differing:
        name = differing[0]
        raise UserError(
            f"{folder} has {name} as {found.get(name, 'no leaf')}, the model as "
            f"{wanted.get(name, 'no leaf')} ({len(differing)} leaves differ); weights fit only the "
            "model that they were saved from; use that run's own config.yaml"
        )
