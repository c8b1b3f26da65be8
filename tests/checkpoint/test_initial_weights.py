"""A run that starts from weights: another run's, or those of a Hugging Face folder."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from olmo_jax.checkpoint import (
    Checkpoints,
    Position,
    initial_weights,
    refuse_start,
    source_of_weights,
)
from olmo_jax.config.records import (
    CheckpointConfig,
    Config,
    ModelConfig,
    RopeConfig,
    RouterConfig,
    WindowConfig,
)
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


def test_the_source_of_weights_counts_where_it_was_trained_on_the_same_data(run_dir: Path) -> None:
    config = small()
    assert source_of_weights(config, FACTS) is None
    checkpoint = CheckpointConfig(init_from=str(run_dir))
    config = config.model_copy(update={"checkpoint": checkpoint})
    found = source_of_weights(config, FACTS)
    assert found is not None
    assert found.position.step == 7
    assert source_of_weights(config, {**FACTS, "data": "other"}) is None


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


def starting(program_of, source: Path, **model) -> Program:
    config = small(**model)
    start = config.checkpoint.model_copy(update={"init_from": str(source)})
    return program_of(config.model_copy(update={"checkpoint": start}))


OTHER = {"norm_eps": 1e-3, "embedding_scale": 2.0}


def test_weights_are_refused_in_a_model_that_computes_something_else(run_dir, program_of) -> None:
    assert refuse_start(starting(program_of, run_dir), FACTS) == []
    other = starting(program_of, run_dir, **OTHER)
    words = r"embedding_scale=2.0, and the .*step_7 were trained with model.embedding_scale=sqrt"
    for allowed in ((), ("seed", "data", "tokenizer")):
        with pytest.raises(UserError, match=rf"norm_eps=0.001, and .*=1.0e-06(.|\n)*{words}"):
            refuse_start(other, FACTS, allowed)
    notes = refuse_start(other, FACTS, ("model",))
    assert [note.partition(": ")[2] for note in notes] == [
        "model.norm_eps 1.0e-06 -> 0.001",
        "model.embedding_scale sqrt_d_model -> 2.0",
    ]
    # Other shapes are refused whatever is allowed.
    with pytest.raises(UserError, match="leaves differ"):
        refuse_start(starting(program_of, run_dir, num_experts=8), FACTS, ("model", "tokenizer"))


def test_weights_are_refused_for_tokens_of_another_tokenizer(run_dir, program_of) -> None:
    program, other = starting(program_of, run_dir), {**FACTS, "tokenizer": "t2"}
    with pytest.raises(
        UserError, match=r"with tokenizer t2, .*with t1; .*--allow-change tokenizer"
    ):
        refuse_start(program, other, ("model", "data"))
    (note,) = refuse_start(program, other, ("tokenizer",))
    assert note.endswith("step_7: tokenizer t1 -> t2")
    # Other data is what a second run is for.
    assert refuse_start(program, {**FACTS, "data": "d2"}) == []


def test_a_hugging_face_folder_is_held_to_its_config_and_its_tokenizer(
    folder, program_of, tmp_path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "hf")
    program = starting(program_of, copy, router=PLAIN)
    assert refuse_start(program, FACTS) == []
    with pytest.raises(UserError, match=r"model.norm_eps=0.001, and .*=1.0e-06"):
        refuse_start(starting(program_of, copy, router=PLAIN, norm_eps=1e-3), FACTS)
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    # `data tokenize` spells the same tokenizer in its own way.
    (copy / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    spelled = hashlib.sha256(tokenizer.to_str(pretty=True).encode()).hexdigest()
    assert refuse_start(program, {**FACTS, "tokenizer": spelled}) == []
    with pytest.raises(UserError, match="--allow-change tokenizer"):
        refuse_start(program, FACTS)


@pytest.mark.parametrize(
    "model",
    [
        {"rope": RopeConfig(scaling="abf")},
        {"windows": WindowConfig(pattern=(4, -1))},
        {"embedding_scale": 8**0.5},
    ],
    ids=str,
)
def test_a_model_is_known_again_in_its_own_export(model, program_of, tmp_path) -> None:
    program = starting(program_of, tmp_path, router=PLAIN, **model)
    huggingface.save(tmp_path, program.config.model, weights_of(program))
    assert refuse_start(program, FACTS) == []


def test_weights_that_are_not_finite_are_refused_by_leaf(tmp_path, program, program_of) -> None:
    main = {name: np.array(leaf) for name, leaf in weights_of(program).items()}
    main["head.norm.gain"][3] = np.nan
    huggingface.save(tmp_path / "hf", program.config.model, main)
    words = r"init_from=.* not finite in head.norm.gain; a run starts from finite weights"
    with pytest.raises(UserError, match=words):
        initial_weights(tmp_path / "hf", program)
    # A run never saves such weights; an older version may have, or moments.
    other = program_of(asks_for_moments(small()))
    state = random_state(other)
    before = state.opt_state
    nu = {name: leaf.at[(0,) * leaf.ndim].set(np.inf) for name, leaf in before.nu.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Checkpoints, "_refuse_nonfinite", lambda *_: None)
        with Checkpoints(tmp_path / "run", CheckpointConfig()) as checkpoints:
            broken = state._replace(opt_state=before._replace(nu=nu))
            checkpoints.save(broken, Position(7, 1, 1), config=other.config, facts=FACTS)
    with pytest.raises(UserError, match=r"not finite in nu/\S+, nu/.* and \d+ more; a run starts"):
        initial_weights(tmp_path / "run", other)
