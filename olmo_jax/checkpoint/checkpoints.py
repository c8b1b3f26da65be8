"""The checkpoints of one run: written behind its steps, read back onto any mesh."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from olmo_jax.checkpoint import disk_errors, folders, manifest, reading
from olmo_jax.checkpoint.checksum import examined
from olmo_jax.checkpoint.folders import RunDir
from olmo_jax.checkpoint.leaves import WEIGHTS, Key, flat, nested, resized, stored, unstored
from olmo_jax.checkpoint.manifest import Position, Saved
from olmo_jax.checkpoint.protocols import Program, S, State
from olmo_jax.config.messages import some
from olmo_jax.config.records import CheckpointConfig, Config
from olmo_jax.errors import UserError

_MAY_BE_NONFINITE = ("history",)
"""The history may tell of bad losses; from anything else that is not finite no step can resume."""


class Checkpoints:
    """Writes a run's checkpoints one after another, in the background, and removes old ones.

    All processes call the same methods in the same order; the first one names and removes folders.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: CheckpointConfig,
        *,
        refuse_lost: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`refuse_lost` raises once the run folder is another; `tell` takes what is to be said."""
        self._run_dir = run_dir
        self._config = config
        self.refuse_lost, self._tell = refuse_lost, tell
        self._named: set[int] = set()
        self._writing: int | None = None
        self._quiet = disk_errors.without_tracebacks()
        # Weights do not compress, and so a checkpoint is as large as its leaves.
        handler = ocp.CompositeCheckpointHandler(
            **{
                folders.STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
                folders.MANIFEST: ocp.JsonCheckpointHandler(folders.MANIFEST_FILE),
            }
        )
        # A folder that is made in the background and refused would be waited for for ever.
        now = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(handler, async_options=now)

    def __enter__(self) -> "Checkpoints":
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # After an error nobody knows whether the newest one is good: the one before it stays.
            self.wait(prune=error is None)
        except UserError:
            # What ends the run already is what the user reads.
            if error is None:
                raise
        finally:
            self._writer.close()
        if error is None:
            self._quiet.__exit__(None, None, None)

    def clean(self) -> None:
        """Remove what killed writers left; only once no other run can be writing there.

        Raises: UserError if the disk refuses it.
        """
        if jax.process_index() == 0:
            with self._told():
                folders.remove_unfinished(self._run_dir)

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, ascending."""
        return folders.steps(self._run_dir)

    def save(
        self, state: State, position: Position, *, config: Config, facts: Mapping[str, str]
    ) -> None:
        """Write a checkpoint; return once the next step may have the buffers.

        `state` is one of `Program.stored`. The write continues behind. What stops it is raised here
        at the next save, or by `wait`.

        Raises: UserError if this or the last write is refused, or if weights or moments are not
            finite; what was whole before stays.
        """
        self.wait()
        self.refuse_lost()
        # On the devices, before the next step may have the buffers; the write comes behind it.
        leaves = flat(stored(state))
        checksums, nonfinite = examined(leaves)
        bad = [key for key in nonfinite if key.role not in _MAY_BE_NONFINITE]
        self._refuse_nonfinite(bad, position, config)
        described = manifest.describe(leaves, checksums, position, config, facts)
        if self._is_there(described):
            return
        folders.refuse_overwriting(folders.folder_of(self._run_dir, position.step))
        with self._told():
            self._writing = position.step
            # Orbax copies what lies on an accelerator before it returns. On the CPU it only looks
            # at the buffers, and XLA gives a step that they are donated to other ones.
            self._writer.save(
                folders.folder_of(self._run_dir, position.step),
                args=ocp.args.Composite(
                    **{
                        folders.STATE: ocp.args.PyTreeSave(nested(leaves)),
                        folders.MANIFEST: ocp.args.JsonSave(described),
                    }
                ),
                force=True,
            )

    def _refuse_nonfinite(self, nonfinite: list[Key], position: Position, config: Config) -> None:
        if not nonfinite:
            return
        there = self.steps()
        then = f"resumes from step {there[-1]}" if there else "starts anew"
        raise UserError(
            f"{some(nonfinite, 4)} are not finite after step {position.step}; a checkpoint holds "
            f"finite weights and moments only, so none was written; lower "
            f"optim.lr={config.optim.lr}: the same command {then}"
        )

    def _is_there(self, described: Mapping[str, Any]) -> bool:
        """Say whether a step's checkpoint is whole already and has the same leaves."""
        step = described["position"]["step"]
        if step not in self.steps():
            return False
        try:
            there = read_saved(self._run_dir, step).leaves
        except UserError:
            return False
        return there == manifest.leaves_of(described)

    def wait(self, *, prune: bool = True) -> None:
        """Wait until the last save is whole, then remove what its being there makes superfluous.

        Raises: UserError if it was refused.
        """
        written, self._writing = self._writing, None
        with self._told():
            try:
                self._writer.wait_until_finished()
            except Exception:
                self._remove_part()
                raise
            # Only now: until the new one is whole, the old ones are what a run resumes from.
            if prune and written is not None and jax.process_index() == 0:
                self.refuse_lost()
                self._remove_superfluous(written)

    def _remove_part(self) -> None:
        """Give back the room that a refused write took, if the disk lets us."""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError, UserError):
                self.refuse_lost()
                folders.remove_unfinished(self._run_dir)

    def _remove_superfluous(self, newest: int) -> None:
        keep, keep_every = self._config.keep, self._config.keep_every
        linked = [step for step in self.steps() if folders.is_linked(self._folder(step))]
        self._name(linked, "is a link: what it leads to is read and never removed")
        self.name_foreign()
        there = [step for step in self.steps() if step not in linked]
        for step in folders.superfluous(there, newest, keep=keep, keep_every=keep_every):
            folders.remove(folders.folder_of(self._run_dir, step))

    def name_foreign(self) -> None:
        """Say once of each checkpoint that another run wrote that it is left alone."""
        there = folders.foreign_steps(self._run_dir)
        self._name(there, "is a checkpoint of another run: it is neither resumed from nor removed")

    def _name(self, steps: list[int], what: str) -> None:
        for step in steps:
            if step not in self._named:
                self._tell(f"warning: {self._folder(step)} {what}")
        self._named.update(steps)

    def _folder(self, step: int) -> Any:
        return folders.folder_of(self._run_dir, step)

    def _told(self) -> Any:
        there = self.steps()
        kept = f"the one of step {there[-1]} is whole" if there else "there is no earlier one"
        return disk_errors.of_writing(folders.root_of(self._run_dir), kept)

    def restore(self, program: Program[S], step: int | None = None) -> tuple[S, Saved]:
        """Return the state of a step, the last one if none is given, laid out as `program` asks.

        Raises: UserError naming a leaf that is missing, too much, of another shape or damaged.
        """
        self.wait()
        saved = read_saved(self._run_dir, step)
        like = program.abstract_stored()
        wanted = flat(stored(like))
        asked = {key: _with_saved_window(key, leaf, saved) for key, leaf in wanted.items()}
        roles = tuple({key.role for key in [*wanted, *saved.leaves]})
        reading.check_leaves(saved, asked, roles, program.config)
        tree = nested(reading.read(saved, asked))
        window = like.history["losses"].shape[0]
        if tree["history"]["losses"].shape[0] != window:
            tree["history"] = _placed(resized(tree["history"], window), like.history)
        return program.restored(unstored(tree, like)), saved


def _with_saved_window(key: Key, leaf: jax.ShapeDtypeStruct, saved: Saved) -> jax.ShapeDtypeStruct:
    """Return the leaf as it is stored: optim.skip_window may differ."""
    if key.role != "history" or key not in saved.leaves or leaf.ndim == 0:
        return leaf
    return leaf.update(shape=saved.leaves[key].shape)


def _placed(leaves: Mapping[str, jax.Array], like: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jax.device_put(leaf, like[name].sharding) for name, leaf in leaves.items()}


def read_saved(run_dir: RunDir, step: int | None = None) -> Saved:
    """Return all that a checkpoint holds but its arrays, of the last step if none is given.

    Raises: UserError if there is none, or if its manifest is damaged.
    """
    return manifest.read(folders.find(run_dir, step))


def restore_weights(
    run_dir: RunDir,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    step: int | None = None,
    *,
    config: Config | None = None,
) -> dict[str, jax.Array]:
    """Return FP32 weights and expert biases by name, in the shapes and shardings of `shapes`.

    Raises: UserError naming a leaf that is missing, too much, of another shape or damaged; with
        the keys that differ, if `config` says what the shapes are of.
    """
    saved = read_saved(run_dir, step)
    wanted = check_weights(saved, shapes, config)
    return {key.name: leaf for key, leaf in reading.read(saved, wanted).items()}


def check_weights(
    saved: Saved, shapes: Mapping[str, jax.ShapeDtypeStruct], config: Config | None
) -> dict[Key, jax.ShapeDtypeStruct]:
    """Return the leaves of weights and expert biases with these shapes; no array is read.

    Raises: UserError as `restore_weights` does for a leaf of another shape.
    """
    wanted = {_weight(name, saved): leaf for name, leaf in shapes.items()}
    reading.check_leaves(saved, wanted, WEIGHTS, config)
    return wanted


def _weight(name: str, saved: Saved) -> Key:
    bias = Key("router_bias", name)
    return bias if bias in saved.leaves else Key("main", name)
