"""A run's checkpoints: bit for bit onto any mesh, strict, and written behind the steps."""

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from olmo_jax.checkpoint import (
    RUN_ID,
    Checkpoints,
    Position,
    folders,
    read_saved,
    reading,
    restore_weights,
)
from olmo_jax.checkpoint.leaves import flat, stored
from olmo_jax.config.records import CheckpointConfig, Config
from olmo_jax.errors import UserError
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.mesh.specs import REPLICATED
from olmo_jax.train.program import Program, build
from olmo_jax.train.run_folder import Lock
from tests.cases import tiny
from tests.checkpoint.states import (
    FACTS,
    assert_same_bits,
    bits_of,
    differing,
    random_state,
    small,
)

matrix = pytest.mark.matrix
KEEP = CheckpointConfig()
FSDP = {"method": "fsdp"}
WHOLE = {"shard_optimizer": False}

LAYOUTS = {
    "1": ({}, None),
    "e2": ({"expert": 2}, None),
    "d2": ({"data": 2}, None),
    "d2-whole": ({"data": 2}, WHOLE),
    "d4": ({"data": 4}, None),
    "d2e2-whole": ({"data": 2, "expert": 2}, WHOLE),
    "d2e4": ({"data": 2, "expert": 4}, None),
    "e8": ({"expert": 8}, None),
    "d8": ({"data": 8}, None),
    "f2-fsdp": ({"fsdp": 2}, FSDP),
    "f4-fsdp": ({"fsdp": 4}, FSDP),
    "d2f2e2-fsdp": ({"data": 2, "fsdp": 2, "expert": 2}, FSDP),
    "f4e2-fsdp": ({"fsdp": 4, "expert": 2}, FSDP),
    "f8-fsdp": ({"fsdp": 8}, FSDP),
    "p2": ({"pipeline": 2}, None),
    "p2-whole": ({"pipeline": 2, "data": 2}, WHOLE),
    "p4d2": ({"pipeline": 4, "data": 2}, None),
    "p2c2e2": ({"pipeline": 2, "expert": 2}, {"pipeline_chunks": 2}),
    "p2c2f2e2-fsdp": ({"pipeline": 2, "fsdp": 2, "expert": 2}, FSDP | {"pipeline_chunks": 2}),
}
PAIRS = [
    ("d2e4", "f4-fsdp"),
    *(
        pytest.param(source, target, marks=matrix)
        for source, target in [
            ("1", "d2e4"),
            ("d2e4", "1"),
            ("1", "f8-fsdp"),
            ("f8-fsdp", "1"),
            ("d2", "e2"),
            ("e2", "d2-whole"),
            ("d2-whole", "f2-fsdp"),
            ("f2-fsdp", "d4"),
            ("d4", "d2e2-whole"),
            ("d2e2-whole", "e8"),
            ("e8", "f4e2-fsdp"),
            ("f4e2-fsdp", "d8"),
            ("d8", "d2f2e2-fsdp"),
            ("d2f2e2-fsdp", "d2e4"),
            ("f4-fsdp", "f4e2-fsdp"),
            ("p2c2e2", "p4d2"),
            ("1", "p4d2"),
            ("p4d2", "f8-fsdp"),
            ("d2e4", "p2c2f2e2-fsdp"),
            ("p2c2f2e2-fsdp", "p2-whole"),
            ("p2-whole", "p2"),
            ("p2", "p2c2e2"),
        ]
    ),
]


def config_of(layout: str) -> Config:
    sizes, parallel = LAYOUTS[layout]
    router = {"bias_gamma": 0.01}
    # An array of each role, and few compilations: a leaf that is odd, one that experts divide.
    # Five layers leave places of four stages empty.
    model = {"num_layers": 5, "num_dense_layers": 0, "embedding_norm": False, "qk_norm": "none"}
    config = tiny(sizes, router=router, model=model)
    changed = config.parallel.model_copy(update=parallel or {})
    return config.model_copy(update={"parallel": changed})


def write(run_dir: Path, config: Config, state, *steps: int, keep: CheckpointConfig = KEEP) -> None:
    with Checkpoints(run_dir, keep) as checkpoints:
        for step in steps:
            position = Position(step, 16 * step, 300 * step)
            checkpoints.save(state, position, config=config, facts=FACTS)


def restored(run_dir: Path, program: Program, step: int | None = None):
    with Checkpoints(run_dir, KEEP) as checkpoints:
        return checkpoints.restore(program, step)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_leaf_comes_back_bit_for_bit_on_another_mesh_and_method(
    tmp_path: Path, program_of, source: str, target: str
) -> None:
    before, after = program_of(config_of(source)), program_of(config_of(target))
    state = random_state(before)
    write(tmp_path, before.config, before.stored(state), 3)
    found, saved = restored(tmp_path, after)
    assert_same_bits(after.stored(found), before.stored(state))
    for key, leaf in flat(stored(found)).items():
        wanted = flat(stored(after.abstract_arguments()[0]))[key]
        assert leaf.shape == wanted.shape
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), key
    wanted = after.rebuild(found.main)
    for name, leaf in found.weights.items():
        assert np.asarray(leaf).tobytes() == np.asarray(wanted[name]).tobytes()
    assert saved.position == (3, 48, 900)
    assert saved.config == before.config.model_dump(mode="json")


def test_another_optimizers_state_is_stored_by_its_own_names_on_any_mesh(
    tmp_path: Path, monkeypatch
) -> None:
    another = optax.chain(optax.trace(0.9), optax.scale_by_lion())
    monkeypatch.setattr("olmo_jax.train.state.optimizer", lambda _: another)
    configs = config_of("p2"), config_of("d2")
    before, after = (build(config, build_mesh(dict(config.mesh))) for config in configs)
    assert before.specs.opt_state[0].trace == before.specs.main
    assert before.specs.opt_state[1].count == REPLICATED
    state = random_state(before)
    write(tmp_path, before.config, before.stored(state), 3)
    keys = read_saved(tmp_path).leaves
    roles = {"main", "0.trace", "1.mu", "router_bias", "history", "counters"}
    assert {key.role for key in keys} == roles
    assert {key.name for key in keys if key.role == "counters"} == {"step", "1.count"}
    found, _ = restored(tmp_path, after)
    assert_same_bits(after.stored(found), before.stored(state))
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state.opt_state)


def test_a_part_of_an_optimizer_whose_name_is_taken_is_refused(state) -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'history'"):
        stored(state._replace(opt_state={"history": state.main}))


@pytest.fixture(scope="module")
def program(program_of) -> Program:
    return program_of(small())


@pytest.fixture(scope="module")
def state(program: Program):
    return random_state(program)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, program: Program, state) -> Path:
    """A run folder with one checkpoint; only read."""
    folder = tmp_path_factory.mktemp("run")
    write(folder, program.config, state, 3)
    return folder


def test_what_is_saved_beside_the_arrays_is_read_without_them(run_dir, program) -> None:
    saved = read_saved(run_dir)
    assert (saved.seed, saved.facts) == (program.config.seed, FACTS)
    assert Config.model_validate(saved.config) == program.config
    assert saved.folder.name == "step_3"


def test_the_disk_holds_twelve_bytes_a_parameter(tmp_path: Path, program_of) -> None:
    program = program_of(small(vocab_size=40_000))
    write(tmp_path, program.config, random_state(program), 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    num_parameters = sum(leaf.size for leaf in program.layout.parameters.values())
    assert 12 <= sum(path.stat().st_size for path in files) / num_parameters < 12.5


def test_roles_and_counters_are_those_of_the_format_without_compute_weights(run_dir: Path) -> None:
    keys = read_saved(run_dir).leaves
    roles = {key.role for key in keys}
    assert roles == {"main", "mu", "nu", "router_bias", "history", "counters"}
    assert {key.name for key in keys if key.role == "counters"} == {"step", "moments"}


def test_a_save_ends_behind_the_step_that_its_buffers_are_given_to(
    tmp_path: Path, monkeypatch, program: Program, state
) -> None:
    """The folder cannot get its name before the steps that overwrite the buffers are done."""
    may_go_on = threading.Event()
    plain = os.rename

    def rename(*paths) -> None:
        assert may_go_on.wait(60)
        plain(*paths)

    monkeypatch.setattr(os, "rename", rename)
    wanted = bits_of(state)
    given = jax.jit(partial(jax.tree.map, jnp.copy))(state)
    step = jax.jit(partial(jax.tree.map, lambda leaf: leaf * 0 - 1), donate_argnums=0)
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        checkpoints.save(given, Position(1, 16, 300), config=program.config, facts=FACTS)
        for _ in range(3):
            given = step(given)
        jax.block_until_ready(given)
        assert checkpoints.steps() == []
        may_go_on.set()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        found, _ = checkpoints.restore(program)
    assert differing(bits_of(found), wanted) == []


def test_large_arrays_are_written_as_they_were_when_they_are_overwritten_at_once(
    tmp_path: Path, program_of
) -> None:
    program = program_of(small(vocab_size=200_000))
    given = random_state(program)
    wanted = bits_of(given)
    step = jax.jit(partial(jax.tree.map, lambda leaf: leaf * 0 - 1), donate_argnums=0)
    step = step.lower(given).compile()
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        checkpoints.save(given, Position(1, 16, 300), config=program.config, facts=FACTS)
        jax.block_until_ready(step(given))
        found, _ = checkpoints.restore(program)
    assert differing(bits_of(found), wanted) == []


def test_the_newest_and_every_nth_are_kept(tmp_path: Path, program: Program, state) -> None:
    keep = CheckpointConfig(keep=2, keep_every=3)
    write(tmp_path, program.config, state, *range(1, 9), keep=keep)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_3",
        "step_6",
        "step_7",
        "step_8",
    ]


def test_an_error_leaves_the_checkpoint_before_the_newest(
    tmp_path: Path, program: Program, state
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    checkpoints.__enter__()
    for step in (1, 2):
        position = Position(step, 1, 1)
        checkpoints.save(state, position, config=program.config, facts=FACTS)
    error = UserError("bad steps")
    checkpoints.__exit__(UserError, error, None)
    assert checkpoints.steps() == [1, 2]


def test_a_step_that_is_there_is_not_written_again(tmp_path: Path, program, state) -> None:
    write(tmp_path, program.config, state, 2)
    folder = tmp_path / "checkpoints" / "step_2"
    inode = folder.stat().st_ino
    write(tmp_path, program.config, state, 2)
    assert folder.stat().st_ino == inode
    other = random_state(program, seed=1)
    write(tmp_path, program.config, other, 2)
    assert_same_bits(restored(tmp_path, program)[0], other)


def test_a_linked_checkpoint_is_read_and_never_removed(tmp_path: Path, program, state) -> None:
    run_dir, away = tmp_path / "run", tmp_path / "large" / "step_1"
    write(run_dir, program.config, state, 1)
    link = run_dir / "checkpoints" / "step_1"
    shutil.copytree(link, away)
    shutil.rmtree(link)
    link.symlink_to(away)
    before = {path: path.is_dir() or path.read_bytes() for path in away.rglob("*")}
    assert_same_bits(restored(run_dir, program)[0], state)
    told: list[str] = []
    with Checkpoints(run_dir, CheckpointConfig(keep=1), tell=told.append) as checkpoints:
        for step in (2, 3, 4):
            checkpoints.save(state, Position(step, 1, 1), config=program.config, facts=FACTS)
    assert told == [f"warning: {link} is a link: what it leads to is read and never removed"]
    # The link takes no place of the ones that are kept.
    assert folders.steps(run_dir) == [1, 4]
    assert {path: path.is_dir() or path.read_bytes() for path in away.rglob("*")} == before
    assert_same_bits(restored(run_dir, program, 1)[0], state)


def test_another_runs_checkpoint_is_neither_counted_nor_removed(
    tmp_path: Path, program, state
) -> None:
    run_dir = tmp_path / "run"
    (run_dir).mkdir()
    (run_dir / RUN_ID).write_text("a")
    write(tmp_path / "other", program.config, state, 1, 9)
    told: list[str] = []
    keep = CheckpointConfig(keep=1)
    with Checkpoints(run_dir, keep, tell=told.append) as checkpoints:
        for step in (2, 3, 4):
            facts = {**FACTS, RUN_ID: "a"}
            checkpoints.save(state, Position(step, 1, 1), config=program.config, facts=facts)
            if step == 2:
                for name in ("step_1", "step_9"):
                    copy = run_dir / "checkpoints" / name
                    shutil.copytree(tmp_path / "other" / "checkpoints" / name, copy)
    assert folders.steps(run_dir) == [4]
    assert folders.foreign_steps(run_dir) == [1, 9]
    assert [text.partition(" is a ")[2] for text in told] == [
        "checkpoint of another run: it is neither resumed from nor removed"
    ] * 2
    assert read_saved(run_dir).position.step == 4


def failing() -> None:
    raise OSError


def test_a_run_whose_folder_is_another_one_saves_and_removes_nothing(
    tmp_path: Path, program, state
) -> None:
    run_dir, gone = tmp_path / "run", tmp_path / "gone"
    lock, second = Lock(run_dir), Lock(run_dir)
    lock.take()
    checkpoints = Checkpoints(run_dir, CheckpointConfig(keep=1), refuse_lost=lock.refuse_lost)
    checkpoints.__enter__()
    facts = {"config": program.config, "facts": FACTS}
    for step in (1, 2):
        checkpoints.save(state, Position(step, 1, 1), **facts)
    checkpoints.wait(prune=False)
    checkpoints.save(state, Position(3, 1, 1), **facts)
    checkpoints._writer.wait_until_finished()
    # Somebody takes the folder away, and starts a run there.
    run_dir.rename(gone)
    second.take()
    shutil.copytree(gone / "checkpoints", run_dir / "checkpoints")
    unfinished = run_dir / "checkpoints" / "step_8.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    there = sorted(run_dir.rglob("*"))
    # Neither what the last save made superfluous goes, nor does another one come.
    for act in (checkpoints.wait, lambda: checkpoints.save(state, Position(4, 1, 1), **facts)):
        with pytest.raises(UserError, match=r"run or its \.lock was removed or replaced while"):
            act()
    # A write that fails takes nothing of the other run's with it.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints._writer, "wait_until_finished", failing)
        with pytest.raises(UserError, match="could not be written"):
            checkpoints.wait()
    checkpoints.__exit__(UserError, UserError("lost"), None)
    lock.free()
    assert sorted(run_dir.rglob("*")) == there
    second.free()


@pytest.mark.parametrize("name", ["e#b", "e%41", "e|b", "e?b", "e*b", "e b:@", "{e}", "e]"])
def test_a_checkpoint_is_verified_wherever_it_lies(
    run_dir: Path, tmp_path: Path, name: str
) -> None:
    moved = shutil.copytree(run_dir, tmp_path / name)
    saved = read_saved(moved)
    for key, leaf in saved.leaves.items():
        assert reading.checksum_of(saved, key) == leaf.checksum


def test_the_skip_rules_window_may_change(run_dir: Path, program_of, state) -> None:
    config = small()
    optim = config.optim.model_copy(update={"skip_window": 5})
    found, _ = restored(run_dir, program_of(config.model_copy(update={"optim": optim})))
    for name in ("losses", "grad_norms"):
        newest = np.asarray(state.history[name])[-5:]
        assert np.asarray(found.history[name]).tobytes() == newest.tobytes()
    assert int(found.history["size"]) == 3


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"num_experts": 8},
            [
                "has main/body.moe.experts.down as float32[1, 4, 6, 8]",
                "the model as float32[1, 8, 6, 8]",
                "write model.num_experts=4, as its run has it",
            ],
        ),
        ({"expert_hidden": 5}, ["main/body.moe.experts.down as", "write model.expert_hidden=6,"]),
        ({"num_layers": 3}, ["as float32[1, 8, 2, 4], the model as float32[2, 8, 2, 4]"]),
        (
            {"attention_bias": True},
            ["lacks main/body.attention.k_bias, which the model has", "model.attention_bias=false"],
        ),
        (
            {"tie_embeddings": True},
            [
                "has main/head.weight as",
                "which the model lacks",
                "write model.tie_embeddings=false",
            ],
        ),
        (
            {"router": small().model.router.model_copy(update={"bias_gamma": None})},
            ["router_bias/body.moe.router.score_bias as float32[1, 4], which the model lacks"],
        ),
    ],
)
def test_another_model_is_refused_by_leaf_and_key(
    run_dir: Path, program_of, changed, words
) -> None:
    with pytest.raises(UserError) as error:
        restored(run_dir, program_of(small(**changed)))
    for word in words:
        assert word in str(error.value)


def shapes_of(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    state = program.abstract_arguments()[0]
    return {**state.main, **state.expert_bias}


def test_weights_come_alone(run_dir: Path, program: Program, state) -> None:
    found = restore_weights(run_dir, shapes_of(program))
    wanted = {**state.main, **state.expert_bias}
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda shapes: shapes.pop("head.weight"), "has main/head.weight as float32[8, 17], which"),
        (
            lambda shapes: shapes.update(more=shapes["head.weight"]),
            "lacks main/more, which the model has as float32[8, 17]",
        ),
    ],
)
def test_weights_are_strict(run_dir: Path, program: Program, change: Callable, words: str) -> None:
    shapes = shapes_of(program)
    change(shapes)
    with pytest.raises(UserError) as error:
        restore_weights(run_dir, shapes)
    assert words in str(error.value)
