"""The weights that a run leaves: whole, strict, and clear when they are not."""

import shutil
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


@pytest.mark.parametrize("damage", ["emptied", "no data"])
def test_a_damaged_folder_is_a_clear_message(run_dir: Path, damage: str) -> None:
    folder = run_dir / "checkpoints" / "step_7"
    victims = [folder] if damage == "emptied" else [folder / "d"]
    for victim in victims:
        shutil.rmtree(victim)
        victim.mkdir()
    with pytest.raises(UserError, match="step_7") as error:
        weights.restore(run_dir, shapes())
    assert error.value.args


def test_no_weights_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights"):
        weights.latest(tmp_path)
