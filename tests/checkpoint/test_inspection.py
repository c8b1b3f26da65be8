"""The commands that look at checkpoints: what they print, and their exit codes."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from olmo_jax import cli
from olmo_jax.checkpoint import Checkpoints, Position, identity, inspection, read_saved
from olmo_jax.checkpoint.leaves import Key
from olmo_jax.config.records import CheckpointConfig, RouterConfig
from olmo_jax.config_file import to_yaml
from olmo_jax.errors import UserError
from olmo_jax.interop import huggingface
from olmo_jax.runtime import environment
from tests.cases import weights_of
from tests.checkpoint.states import FACTS, random_state, small

CONFIG = small(router=RouterConfig())


@pytest.fixture(autouse=True)
def prepared(monkeypatch) -> None:
    """The devices of the test run serve."""
    monkeypatch.setattr(environment, "prepare", lambda number: ())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, program_of) -> Path:
    """Steps 2 and 4 of a run; in step 4 two leaves differ."""
    program, folder = program_of(CONFIG), tmp_path_factory.mktemp("runs") / "one"
    state = random_state(program)
    main = {name: jax.numpy.asarray(leaf) for name, leaf in weights_of(program).items()}
    state = state._replace(main=main)
    gain = main["head.norm.gain"]
    other = state._replace(main=main | {"head.norm.gain": gain.at[3].add(0.5)}, step=state.step + 1)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        for step, one in ((2, state), (4, other)):
            position = Position(step, 8 * step, 1000 * step)
            facts = {**FACTS, "tokenizer": hashlib.sha256(b"{}").hexdigest()}
            checkpoints.save(one, position, config=CONFIG, facts=facts)
    return folder


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_list_has_a_row_for_each_whole_checkpoint(run_dir: Path, capsys) -> None:
    code, out, _ = call(capsys, "list", run_dir)
    heading, first, second = out.splitlines()
    assert code == 0
    assert heading.split() == ["step", "written", "size", "tokens"]
    date = read_saved(run_dir, 2).written[:10]
    assert first.split()[:2] == ["2", date]
    assert first.split()[-1] == "2,000"
    assert second.split()[0] == "4"


def test_a_list_of_one_checkpoint_has_its_row(run_dir: Path, capsys) -> None:
    code, out, _ = call(capsys, "list", run_dir / "checkpoints" / "step_2")
    _, row = out.splitlines()
    assert (code, row.split()[0]) == (0, "2")


def test_what_is_as_it_was_written_is_said_so(run_dir: Path, capsys) -> None:
    num_leaves = len(read_saved(run_dir).leaves)
    code, out, _ = call(capsys, "verify", run_dir)
    assert (code, out.split(":")[0]) == (0, f"{run_dir}/checkpoints/step_4")
    assert f"{num_leaves} leaves" in out
    assert "step_2: " in call(capsys, "verify", run_dir, "--step", 2)[1]
    code, _, err = call(capsys, "verify", run_dir, "--step", 3)
    assert code == 1
    assert "no checkpoint of step 3; it has 2, 4" in err


def test_a_difference_is_shown_leaf_by_leaf(run_dir: Path, capsys) -> None:
    steps = run_dir / "checkpoints"
    code, out, _ = call(capsys, "diff", run_dir, steps / "step_2")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:-1]}
    assert code == 1
    assert rows.keys() == {"counters/step", "main/head.norm.gain"}
    assert rows["main/head.norm.gain"][0] == "5.000e-01"
    gain = np.float64(weights_of_step_2(run_dir))
    assert float(rows["main/head.norm.gain"][1]) == pytest.approx(
        0.5 / np.linalg.norm(gain), rel=1e-3
    )
    total = len(read_saved(run_dir).leaves)
    assert out.splitlines()[-1] == f"{total - 2} of {total} leaves are equal, bit for bit"


def weights_of_step_2(run_dir: Path) -> np.ndarray:
    return np.asarray(inspection.weights_on_host(read_saved(run_dir, 2))["head.norm.gain"])


def test_equal_checkpoints_differ_in_nothing(run_dir: Path, tmp_path: Path, capsys) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    code, out, _ = call(capsys, "diff", run_dir, copy)
    total = len(read_saved(run_dir).leaves)
    assert (code, out) == (0, f"{total} of {total} leaves are equal, bit for bit\n")


def test_leaves_of_two_models_are_compared_by_name(run_dir: Path, tmp_path, program_of) -> None:
    program = program_of(small(expert_hidden=5))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        state = random_state(program)
        checkpoints.save(state, Position(1, 1, 1), config=program.config, facts=FACTS)
    a, b = read_saved(run_dir), read_saved(tmp_path)
    bias = Key("router_bias", "body.moe.router.score_bias")
    assert inspection.difference(a, b, bias) == "only in B"
    assert inspection.difference(b, a, bias) == "only in A"
    assert inspection.difference(a, b, Key("mu", "body.moe.experts.down")) == (
        "float32[1, 4, 6, 8] and float32[1, 4, 5, 8]"
    )


def test_exported_weights_are_read_back_by_their_class(run_dir: Path, tmp_path, capsys) -> None:
    (run_dir / "tokenizer.json").write_text("{}")
    code, out, _ = call(capsys, "export-weights", run_dir, tmp_path / "hf")
    assert code == 0
    assert f"{tmp_path}/hf: the weights of step 4" in out
    _, params = huggingface.load(tmp_path / "hf")
    wanted = inspection.weights_on_host(read_saved(run_dir))
    chex.assert_trees_all_equal(dict(params), dict(wanted))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    code, _, err = call(capsys, "export-weights", run_dir, tmp_path / "hf")
    assert code == 1
    assert "is there already and not empty" in err


def test_an_edited_run_folder_is_not_exported(run_dir: Path, tmp_path, capsys) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    model = CONFIG.model.model_copy(update={"norm_eps": 1e-3, "embedding_scale": 2.0})
    (run / "config.yaml").write_text(to_yaml(CONFIG.model_copy(update={"model": model})))
    code, _, err = call(capsys, "export-weights", run, tmp_path / "hf")
    assert code == 1
    assert "config.yaml has model.norm_eps=0.001, and the weights of " in err
    assert "write model.embedding_scale=sqrt_d_model there" in err
    (run / "config.yaml").write_text(to_yaml(CONFIG))
    (run / "tokenizer.json").write_text("{ }")
    code, _, err = call(capsys, "export-weights", run, tmp_path / "hf")
    assert code == 1
    assert "copy the tokenizer.json of the run's data there" in err
    assert not (tmp_path / "hf").exists()
    # A checkpoint that another version wrote, with a key that is not known here.
    saved = read_saved(run_dir)
    other = {**saved.config, "model": {**saved.config["model"], "num_heads": 0}}
    with pytest.raises(UserError, match=r"step_4 has another model.*model.num_heads=0 is below 1"):
        identity.model_of(replace(saved, config=other))


def test_what_hugging_face_cannot_say_is_refused(tmp_path: Path, program_of, capsys) -> None:
    program = program_of(small())
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        state = random_state(program)
        checkpoints.save(state, Position(1, 1, 1), config=program.config, facts=FACTS)
    code, _, err = call(capsys, "export-weights", tmp_path, tmp_path / "hf")
    assert code == 1
    assert "model.router.bias_gamma=0.01 cannot be written as Olmo3MoeForCausalLM" in err
    assert not (tmp_path / "hf").exists()
