"""The weights that a run leaves: whole, strict, and clear when they are not."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.checkpoint import weights
from olmo_jax.errors import UserError

PARAMS = {"body.moe.router.weight": jnp.arange(6.0).reshape(2, 3), "head.norm.gain": jnp.ones(3)}


def shapes(**changed: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {name: leaf.shape for name, leaf in PARAMS.items()} | changed
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in wanted.items()
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    weights.save(tmp_path, 7, PARAMS)
    return tmp_path


def test_weights_come_back_bit_for_bit(run_dir: Path) -> None:
    restored = weights.restore(run_dir, shapes())
    assert restored.keys() == PARAMS.keys()
    for name, leaf in PARAMS.items():
        np.testing.assert_array_equal(restored[name], leaf)


def test_the_last_step_counts_and_a_half_written_one_does_not(run_dir: Path) -> None:
    weights.save(run_dir, 12, PARAMS)
    (run_dir / "checkpoints" / "step_99.orbax-checkpoint-tmp").mkdir()
    assert weights.latest(run_dir).name == "step_12"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"extra": (3,)}, "has extra as no leaf, the model as (3,)"),
        ({"head.norm.gain": (4,)}, "has head.norm.gain as (3,), the model as (4,)"),
    ],
)
def test_another_models_weights_are_refused_by_leaf(run_dir: Path, changed, words) -> None:
    with pytest.raises(UserError) as error:
        weights.restore(run_dir, shapes(**changed))
    assert words in str(error.value)


RESTORE = """
import sys, jax, pathlib
from olmo_jax.checkpoint import weights
from olmo_jax.errors import UserError
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
shapes = {"head.norm.gain": jax.ShapeDtypeStruct((3,), "float32", sharding=sharding)}
try:
    weights.restore(pathlib.Path(sys.argv[1]), shapes)
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("damage", [".", "d"])
def test_a_damaged_folder_is_a_clear_message(tmp_path: Path, damage: str) -> None:
    weights.save(tmp_path, 7, {"head.norm.gain": jnp.ones(3)})
    victim = tmp_path / "checkpoints" / "step_7" / damage
    shutil.rmtree(victim)
    victim.mkdir()
    # In a process of its own: TensorStore still answers reads that Orbax no longer waits for.
    command = [sys.executable, "-c", RESTORE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("refused:"), done.stderr
    assert "step_7" in done.stdout


def test_no_weights_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights"):
        weights.latest(tmp_path)
