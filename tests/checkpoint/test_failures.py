"""What goes wrong with a disk: said in one message, and the last whole checkpoint stays."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from olmo_jax.checkpoint import (
    Checkpoints,
    Position,
    Saved,
    inspection,
    read_saved,
    restore_weights,
)
from olmo_jax.checkpoint.leaves import WEIGHTS, Key, flat, stored
from olmo_jax.checkpoint.reading import blocks_of
from olmo_jax.config.records import CheckpointConfig
from olmo_jax.errors import UserError
from olmo_jax.train.program import Program
from tests.checkpoint.states import FACTS, random_state, small

ROOT = Path(__file__).parents[2]
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
MODEL = small(d_model=64, expert_hidden=24, vocab_size=301)
"""Some of its leaves are so small that Orbax keeps them in its index."""


def write(run_dir: Path, program: Program) -> None:
    """Write the checkpoint of step 5."""
    with Checkpoints(run_dir, CheckpointConfig()) as checkpoints:
        state = random_state(program)
        checkpoints.save(state, Position(5, 1, 1), config=program.config, facts=FACTS)


def start_writer(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.checkpoint.writer", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def weights_of(run_dir: Path) -> dict[str, jax.Array]:
    """Return the weights of the last checkpoint, checked."""
    leaves = read_saved(run_dir).leaves
    shapes = {
        key.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=DEVICE)
        for key, leaf in leaves.items()
        if key.role in WEIGHTS
    }
    return restore_weights(run_dir, shapes)


def kill_while_writing(run_dir: Path, draw: random.Random) -> int:
    """Let a writer write some steps, kill it at a random moment, and return its last whole step."""
    process = start_writer(run_dir, 1000)
    assert process.stdout is not None
    last = int(process.stdout.readline())
    time.sleep(draw.uniform(0, 0.5))
    process.kill()
    rest, _ = process.communicate()
    return max([last, *map(int, rest.split())])


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.matrix)])
def test_a_writer_killed_at_any_moment_leaves_a_whole_last_checkpoint(
    tmp_path: Path, kills: int
) -> None:
    draw = random.Random(kills)
    for _ in range(kills):
        told = kill_while_writing(tmp_path, draw)
        saved = read_saved(tmp_path)
        step = saved.position.step
        # It may have been killed between the end of a write and the line that tells it.
        assert step in (told, told + 1)
        assert saved.position == (step, 2 * step, 9 * step)
        for name, leaf in weights_of(tmp_path).items():
            assert (np.asarray(leaf) == step).all(), name
        assert "all as written" in inspection.verify(str(tmp_path), None)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, list[object], str]]:
    """A disk with room for one checkpoint and a half; without the right to mount one, a limit.

    The limit is on the size of a file: the system refuses a write as it does on a full disk.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if (
        os.geteuid() == 0
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    ):
        yield disk / "run", [], "No space left on device; a checkpoint counts once"
        subprocess.run(["umount", str(disk)], check=True)
    else:
        yield disk / "run", ["--limit-after", 1, 50_000], "File too large; a checkpoint counts once"


def test_a_full_disk_is_told_and_loses_nothing(full_disk) -> None:
    run_dir, arguments, words = full_disk
    process = start_writer(run_dir, 3, *arguments)
    out, err = process.communicate()
    told = out.splitlines()
    assert told[0] == "1"
    assert words in told[1]
    assert "could not be written" in told[1]
    assert "the one of step 1 is whole" in told[1]
    assert "Traceback" not in err
    assert process.returncode == 1
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]
    assert (np.asarray(weights_of(run_dir)["head.norm.gain"]) == 1).all()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nothing can be written into; a mode does not stop root, a mount does."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=True).returncode == 0
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_is_told(read_only: Path, program_of, capfd) -> None:
    program = program_of(small())
    with pytest.raises(UserError) as error:
        write(read_only / "run", program)
    assert f"{read_only}/run/checkpoints could not be written" in str(error.value)
    assert "there is no earlier one" in str(error.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def whole(tmp_path_factory, program_of) -> Path:
    """A run folder with one checkpoint; only copied."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, program_of(MODEL))
    return folder


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def data_files(run_dir: Path) -> list[Path]:
    """Return the files with arrays in them, the largest first."""
    files = (run_dir / "checkpoints" / "step_5" / "state").rglob("d/*")
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def place_of(run_dir: Path, key: Key, program: Program) -> tuple[Path, int]:
    """Return the file that holds a leaf, and where it begins there."""
    state = random_state(program)
    wanted = np.asarray(flat(stored(state))[key]).tobytes()
    for path in data_files(run_dir):
        if (place := path.read_bytes().find(wanted)) >= 0:
            return path, place
    raise AssertionError(f"{key} is in no file")


@pytest.mark.parametrize(
    ("key", "offset"),
    [
        (Key("main", "head.weight"), 0),
        (Key("mu", "body.moe.experts.down"), 101),
        (Key("nu", "leading.0.attention.k"), 7),
        (Key("mu", "embedding.weight"), 3),
    ],
)
def test_one_flipped_byte_is_found_and_its_leaf_named(
    run_dir: Path, program_of, key: Key, offset: int
) -> None:
    program = program_of(MODEL)
    path, place = place_of(run_dir, key, program)
    flip(path, place + offset)
    with pytest.raises(UserError) as error:
        inspection.verify(str(run_dir), None)
    assert f"1 of {len(read_saved(run_dir).leaves)} leaves" in str(error.value)
    assert f"are damaged: {key};" in str(error.value)
    checkpoints = Checkpoints(run_dir, CheckpointConfig())
    with checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(program)
    assert f"{key} in {run_dir}/checkpoints/step_5 is damaged" in str(error.value)


@pytest.mark.parametrize("stride", [39_989, pytest.param(2503, marks=pytest.mark.matrix)])
def test_no_flipped_byte_anywhere_changes_a_leaf_unseen(run_dir: Path, stride: int) -> None:
    """A byte that no leaf is read from may go unseen: Orbax leaves older versions of its index."""
    saved = read_saved(run_dir)
    before = {key: bytes_of(saved, key) for key in saved.leaves}
    files = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file()]
    seen = 0
    for path in files:
        for place in range(path.stat().st_size // 2 % stride, path.stat().st_size, stride):
            flip(path, place)
            try:
                inspection.verify(str(run_dir), None)
            except UserError:
                seen += 1
            else:
                assert {key: bytes_of(saved, key) for key in saved.leaves} == before, (path, place)
            flip(path, place)
    assert seen > 5
    assert "all as written" in inspection.verify(str(run_dir), None)


def bytes_of(saved: Saved, key: Key) -> bytes:
    return b"".join(block.tobytes() for _, block in blocks_of(saved.folder, key, saved.leaves[key]))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_cut_or_missing_file_is_told_by_leaf(run_dir: Path, program_of, damage: str) -> None:
    path, _ = place_of(run_dir, Key("main", "head.weight"), program_of(MODEL))
    if damage == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(UserError) as error:
        inspection.verify(str(run_dir), None)
    assert "leaves of" in str(error.value)
    assert "are damaged: " in str(error.value)
    with pytest.raises(UserError, match=r"main/\S+ in \S+step_5 is damaged \(it cannot be read\)"):
        weights_of(run_dir)


@pytest.mark.parametrize("name", ["manifest/manifest.json", "state/manifest.ocdbt"])
def test_a_damaged_index_is_told(run_dir: Path, name: str) -> None:
    path = run_dir / "checkpoints" / "step_5" / name
    flip(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match="damaged"):
        inspection.verify(str(run_dir), None)


@pytest.mark.parametrize(
    ("name", "there", "damaged"),
    [
        ("_METADATA", b"null}", b""),
        ("_METADATA", b"jax.Array", b"jax.Arrax"),
        ("_METADATA", b'"head.norm.gain"', b'"head.norm.gbin"'),
        ("_METADATA", b"false", b"true"),
        ("array_metadatas/process_0", b"}]}", b"}]"),
        ("array_metadatas/process_0", b"null", b"nuLl"),
    ],
)
def test_damaged_metadata_of_orbax_is_told(
    run_dir: Path, name: str, there: bytes, damaged: bytes
) -> None:
    path = run_dir / "checkpoints" / "step_5" / "state" / name
    content = path.read_bytes()
    path.write_bytes(content.replace(there, damaged))
    assert path.read_bytes() != content
    with pytest.raises(UserError, match=r"Orbax's metadata is damaged in \S+step_5 \("):
        inspection.verify(str(run_dir), None)


def test_a_leaf_that_orbax_gives_as_no_array_is_told(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step_5" / "state" / "_METADATA"
    path.write_bytes(path.read_bytes().replace(b'"head.norm.gain"', b'"head.norm.gbin"'))
    with pytest.raises(UserError, match=r"metadata has main/head.norm.gain as no array; .* anew"):
        weights_of(run_dir)


def test_numbers_that_are_not_finite_are_no_checkpoint(tmp_path: Path, program_of) -> None:
    program = program_of(MODEL)
    state = random_state(program)
    mu = state.opt_state.mu
    infinite = {"head.norm.gain": mu["head.norm.gain"].at[3].set(-np.inf)}
    nonfinite = state._replace(opt_state=state.opt_state._replace(mu=mu | infinite))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    position = Position(5, 1, 1)
    with checkpoints:
        checkpoints.save(state, position, config=program.config, facts=FACTS)
        with pytest.raises(UserError) as error:
            checkpoints.save(
                nonfinite, position._replace(step=6), config=program.config, facts=FACTS
            )
    told = str(error.value)
    assert told.startswith("mu/head.norm.gain are not finite after step 6; ")
    assert told.endswith("lower optim.lr=0.001: the same command resumes from step 5")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_5"]


def test_a_live_save_outlasts_another_run_that_opens_the_folder(tmp_path: Path) -> None:
    live = tmp_path / "checkpoints" / "step_7.orbax-checkpoint-tmp"
    (live / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert live.exists()
        checkpoints.clean()
        assert not live.exists()


def test_a_save_replaces_no_folder_that_no_run_wrote(tmp_path: Path, program_of) -> None:
    foreign = tmp_path / "checkpoints" / "step_5" / "mydata"
    foreign.mkdir(parents=True)
    with pytest.raises(UserError, match=r"step_5 is there and is no checkpoint; .* move it away"):
        write(tmp_path, program_of(MODEL))
    assert foreign.exists()


def test_a_folder_without_its_manifest_is_no_checkpoint(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_5" / "manifest" / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds no checkpoint"):
        read_saved(run_dir)
