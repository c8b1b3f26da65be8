"""A run that starts from weights: another run's, or those of a Hugging Face folder."""

from pathlib import Path

import numpy as np
import pytest

from olmo_jax.checkpoint import Checkpoints, Position, initial_weights
from olmo_jax.config.records import CheckpointConfig, Config, ModelConfig, RouterConfig
from olmo_jax.errors import UserError
from olmo_jax.interop import huggingface
from olmo_jax.train.program import Program
from tests.cases import weights_of
from tests.checkpoint.states import FACTS, random_state, small

PLAIN = RouterConfig()


def asks_for_moments(config: Config) -> Config:
    return config.model_copy(update={"checkpoint": CheckpointConfig(init_moments=True)})


def assert_bits(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, program_of) -> Path:
    program, folder = program_of(small()), tmp_path_factory.mktemp("run")
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        state = random_state(program)
        checkpoints.save(state, Position(7, 1, 1), config=program.config, facts=FACTS)
    return folder


def test_a_run_gives_its_weights_and_selection_biases(run_dir: Path, program_of) -> None:
    program = program_of(small())
    state = random_state(program)
    main, expert_bias, opt_state = initial_weights(run_dir, program)
    assert_bits(main, state.main)
    assert_bits(expert_bias, state.expert_bias)
    assert opt_state is None


def test_a_run_gives_its_moments_when_asked(run_dir: Path, program_of) -> None:
    program = program_of(asks_for_moments(small()))
    state = random_state(program)
    _, _, opt_state = initial_weights(run_dir / "checkpoints" / "step_7", program)
    assert_bits(opt_state.mu, state.opt_state.mu)
    assert_bits(opt_state.nu, state.opt_state.nu)
    assert int(opt_state.count) == int(state.opt_state.count)


def test_a_run_of_another_model_is_refused(run_dir: Path, program_of) -> None:
    with pytest.raises(UserError, match=r"main/\S+ as .* write model.num_experts=4"):
        initial_weights(run_dir, program_of(small(num_experts=8)))


@pytest.fixture(scope="module")
def program(program_of) -> Program:
    config = small(router=PLAIN)
    mesh = config.mesh.model_copy(update={"expert": 2, "data": 2})
    return program_of(config.model_copy(update={"mesh": mesh}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, program: Program) -> Path:
    path = tmp_path_factory.mktemp("hf")
    huggingface.save(path, program.config.model, weights_of(program))
    return path


def test_a_hugging_face_folder_gives_its_weights_where_the_mesh_wants_them(
    folder: Path, program: Program
) -> None:
    main, expert_bias, opt_state = initial_weights(folder, program)
    assert_bits(main, weights_of(program))
    for name, leaf in main.items():
        wanted = program.abstract_arguments()[0].main[name].sharding
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    assert (expert_bias, opt_state) == ({}, None)


def test_selection_biases_start_at_zero_where_the_folder_has_none(folder, program_of) -> None:
    _, expert_bias, _ = initial_weights(folder, program_of(small()))
    assert [not np.asarray(leaf).any() for leaf in expert_bias.values()] == [True]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_experts": 8}, "body.moe.experts.down as [1, 4, 6, 8], the model as [1, 8, 6, 8]"),
        ({"tie_embeddings": True}, "has head.weight as [8, 17], the model as no leaf"),
    ],
)
def test_a_folder_of_another_model_is_refused(folder, program_of, changed, words) -> None:
    model: ModelConfig = small(router=PLAIN, **changed).model
    with pytest.raises(UserError) as error:
        initial_weights(folder, program_of(small().model_copy(update={"model": model})))
    assert words in str(error.value)


def test_what_cannot_give_moments_or_weights_is_refused(tmp_path, folder, program_of) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.init_moments=true, but"):
        initial_weights(folder, program_of(asks_for_moments(small(router=PLAIN))))
    with pytest.raises(UserError, match=r"checkpoint\.init_from=.*nowhere is not there"):
        initial_weights(tmp_path / "nowhere", program_of(small()))
    with pytest.raises(UserError, match="holds no checkpoint"):
        initial_weights(tmp_path, program_of(small()))
