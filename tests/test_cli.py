"""The commands as a user meets them: exit codes, what is printed, what is left."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import olmo_jax.config_file
from olmo_jax.arguments import parse
from olmo_jax.cli import main
from olmo_jax.config_file import load
from olmo_jax.runtime import environment

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
NO_DATA = "data.sources=[{path: no/data}]"
LAUNCH_LOCAL = ["launch", "local", "--processes", "2", "--"]
TINY = {
    "mesh": {"expert": 2},
    "model": {
        "num_layers": 2,
        "num_dense_layers": 1,
        "d_model": 16,
        "vocab_size": 300,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "expert_hidden": 16,
        "shared_hidden": 16,
        "dense_hidden": 16,
        "dtype": "float32",
    },
    "data": {"eval_fraction": 0.2},
    "train": {
        "steps": 4,
        "global_batch": 4,
        "microbatch": 1,
        "sequence_length": 32,
        "eval_every": 2,
        "eval_batches": 2,
        "record_expert_counts": True,
    },
    "optim": {"schedule": {"kind": "constant"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of a small text, and a config of a small model on them."""
    path = tmp_path_factory.mktemp("cli")
    documents = [f"{i} squared is {i * i}, and cubed it is {i**3}." for i in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (path / "text.jsonl").write_text(lines)
    source = ["--input", str(path / "text.jsonl"), "--output", str(path / "tokens")]
    assert main(["data", "tokenize", *source, "--vocab-size", "300"]) == 0
    config: dict[str, Any] = {**TINY, "run_dir": str(path / "run")}
    config["data"] = {**config["data"], "sources": [{"path": str(path / "tokens")}]}
    (path / "tiny.yaml").write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user's shell: nothing of the test run's own, a cache to share."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return {**own, "OLMO_JAX_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def trained(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A whole run of the command, to its end."""
    command = [sys.executable, "-m", "olmo_jax.cli", "train", str(folder / "tiny.yaml")]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test run has set the environment and imported jax already."""
    monkeypatch.setattr(environment, "prepare", lambda *_, **__: ())


def started(arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "olmo_jax.cli", *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"the command ended before it said {words!r}")


def metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


def test_check_answers_at_once_and_imports_no_jax() -> None:
    code = (
        "import sys; from olmo_jax.cli import main; "
        f"code = main(['check', {QUICKSTART!r}]); sys.exit(code or 7 * ('jax' in sys.modules))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time: what a quiet machine takes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    for words in ("parameters", "data=2 x expert=4", "tokens a step", "microbatch"):
        assert words in done.stdout


def test_version_names_those_of_jax_and_imports_none() -> None:
    code = (
        "import sys; from olmo_jax.cli import main\n"
        "try: main(['--version'])\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    number = r"\d+\.\d+\.\d+\S*"
    packages = ", ".join(f"{name} {number}" for name in ("olmo_jax", "jax", "jaxlib"))
    assert re.fullmatch(f"{packages}, Python {number}\n", done.stdout)
    assert f"jax {version('jax')}," in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("olmo-jax ch", "check checkpoint"),
        ("olmo-jax compile c.yaml --target h", "h100 h200"),
        ("olmo-jax check configs/quick", "configs/quickstart.yaml"),
        ("olmo-jax plan c.yaml --picture configs/quick", "configs/quickstart.yaml"),
        ("olmo-jax checkpoint verify configs/quick", "configs/quickstart.yaml"),
    ],
)
def test_bash_completes_commands_choices_and_files(
    words: str, offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--print-completion", "bash"])
    assert left.value.code == 0
    tab = (
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "_shtab_olmo_jax; echo ${COMPREPLY[*]}"
    )
    script = f"{capsys.readouterr().out}\n{tab}\n"
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout == f"{offered}\n", done.stderr


def test_check_warns_of_a_key_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", QUICKSTART, "optim.skip_window=64"]) == 0
    assert "optim.skip_window=64 has no effect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", QUICKSTART, "mesh.expert=3"], "mesh.expert=3 does not divide"),
        (["check", "no/such.yaml"], "no/such.yaml cannot be read"),
        (["train", QUICKSTART, "train.stepz=3"], "nearest known key is train.steps"),
        (["plan", QUICKSTART, "--json", "optim.lr=-1"], "optim.lr=-1 is below 0"),
        (
            [*LAUNCH_LOCAL, "train", QUICKSTART, "--allow-change", "seed", "mesh.expert=3"],
            "mesh.expert=3 does not divide",
        ),
        (["train", QUICKSTART, "run_dir=no/run", NO_DATA], "there is no such folder"),
        (["data", "show", QUICKSTART, NO_DATA], "no such folder"),
        (["data", "tokenize", "--input", "no/text", "--output", "x"], "no such file"),
        (["eval", "no/run"], "no/run holds no run"),
        (["sample", "no/run", "text"], "no/run holds no run"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_users_mistake_is_one_message_and_exit_1(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.err.startswith("olmo-jax: ")
    assert words in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["plan", QUICKSTART, "seed=1", "--jsn"],
        ["check", QUICKSTART, "--nope", "seed=1"],
        [*LAUNCH_LOCAL, "train", QUICKSTART, "--nope"],
        ["checkpoint", "list", "run", "seed=1"],
        ["sample", "run", "text", "--tokens", "0"],
        ["sample", "run", "text", "--temperature", "-1"],
        ["sample", "run", "text", "--temperature", "nan"],
        [
            "data",
            "tokenize",
            "--input",
            "a",
            "--output",
            "b",
            "--vocab-size",
            "9",
            "--tokenizer",
            "c",
        ],
    ],
)
def test_a_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: olmo-jax" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("plan", "--json"),
        ("compile", "--target h100"),
        ("train", "--allow-change seed"),
        ("data show", "--step 3"),
        ("launch slurm --nodes 4", "--dry-run"),
        ("launch kubernetes --nodes 4", "--image olmo-jax:1"),
    ],
)
def test_an_option_stands_anywhere(command: str, option: str) -> None:
    words = ["c.yaml", "optim.lr=-1", "seed=1"]
    given = [
        parse([*command.split(), *words[:place], *option.split(), *words[place:]])
        for place in range(len(words) + 1)
    ]
    assert all(one == given[0] for one in given)
    assert given[0].overrides == words[1:]


def test_options_between_overrides_keep_their_order() -> None:
    line = "plan --json c.yaml seed=1 --devices 8 seed=2 --search -- seed=3"
    given = parse(line.split())
    assert given.overrides == ["seed=1", "seed=2", "seed=3"]
    assert (given.json, given.devices, given.search) == (True, 8, True)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("check ~/x", "config"),
        ("plan ~/x", "config"),
        ("plan c.yaml --hardware ~/x", "hardware"),
        ("plan c.yaml --picture ~/x", "picture"),
        ("compile ~/x", "config"),
        ("compile c.yaml --hlo ~/x", "hlo"),
        ("train ~/x", "config"),
        ("eval ~/x", "run"),
        ("sample ~/x text", "run"),
        ("data tokenize --input ~/x --output y", "input"),
        ("data tokenize --input y --output ~/x", "output"),
        ("data tokenize --input y --output z --tokenizer ~/x", "tokenizer"),
        ("data show ~/x", "config"),
        ("checkpoint list ~/x", "run"),
        ("checkpoint verify ~/x", "run"),
        ("checkpoint diff ~/x y", "first"),
        ("checkpoint diff y ~/x", "second"),
        ("checkpoint export-weights ~/x y", "run"),
        ("checkpoint export-weights y ~/x", "out"),
        ("launch local --processes 2 --logs ~/x -- train c.yaml", "logs"),
        ("launch slurm --nodes 2 ~/x", "config"),
        ("launch slurm --nodes 2 c.yaml --python ~/x", "python"),
        ("launch kubernetes --nodes 2 --image i ~/x", "config"),
    ],
)
def test_a_path_may_be_in_the_home_folder(
    line: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = getattr(parse(line.split()), name)
    assert str(given[0] if name == "input" else given) == "/home/me/x"
    with pytest.raises(SystemExit):
        parse(line.replace("~", "~no-such-user").split())
    assert "write the whole path" in capsys.readouterr().err


def test_tokens_in_the_home_folder_are_written_and_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one and two and three " * 50)
    no_evaluation = ["data.eval_fraction=0", "train.eval_every=0"]
    words = ["--input", "~/text.txt", "--output", "~/tokens", "--vocab-size", "300"]
    assert main(["data", "tokenize", *words]) == 0
    assert (tmp_path / "tokens" / "manifest.json").exists()
    assert (
        main(["data", "show", QUICKSTART, *no_evaluation, "data.sources=[{path: ~/tokens}]"]) == 0
    )
    assert not (tmp_path / "~").exists()


def test_ctrl_c_is_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(olmo_jax.config_file, "load", interrupt)
    assert main(["check", QUICKSTART]) == 130
    assert capsys.readouterr().err == "olmo-jax: interrupted\n"


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_ctrl_c_while_compiling_leaves_at_once(folder: Path, variables: dict[str, str]) -> None:
    where = f"run_dir={folder / 'interrupted'}"
    process = started(["train", str(folder / "tiny.yaml"), where, "model.d_model=24"], variables)
    wait_for(process, "compiling")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "olmo-jax: interrupted\n"
    assert not (folder / "interrupted" / "metrics.jsonl").exists()


def test_train_leaves_the_run_folder_and_says_so(
    folder: Path, trained: subprocess.CompletedProcess[str]
) -> None:
    assert trained.returncode == 0, trained.stderr
    run_dir = folder / "run"
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        *("config.yaml", "devices.txt", "metrics.jsonl", "report.png", "run_id", "tokenizer.json"),
        "checkpoints",
    }
    for words in ("2 CPU device(s) are emulated", "trained 4 steps", "checkpoints/step_4"):
        assert words in trained.stdout
    assert trained.stderr == ""
    lines = list(metrics(run_dir))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    # Two routes for each real token.
    assert sum(map(sum, lines[0]["expert_counts"])) == 2 * lines[0]["tokens"]
    assert len((run_dir / "devices.txt").read_text().splitlines()) == 3


@pytest.mark.usefixtures("trained")
def test_the_resolved_config_trains_the_same_run(folder: Path) -> None:
    config = olmo_jax.config_file.load(folder / "run" / "config.yaml")
    assert config == olmo_jax.config_file.load(folder / "tiny.yaml")


@pytest.mark.usefixtures("trained", "in_this_process")
def test_a_finished_run_is_left_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    assert main(["train", str(folder / "tiny.yaml")]) == 0
    assert "has reached step 4 of train.steps=4 already" in capsys.readouterr().out
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("trained", "in_this_process")
def test_another_model_does_not_go_on_with_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["train.steps=9", "model.d_model=24", "seed=7"]
    assert main(["train", str(folder / "tiny.yaml"), *more, "--allow-change", "seed"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("olmo-jax: model.d_model=24, and ")
    assert "seed" not in said


@pytest.mark.usefixtures("trained", "in_this_process")
def test_eval_gives_the_loss_that_training_ended_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder / "run")]) == 0
    *_, last = metrics(folder / "run")
    assert f"loss {last['eval_loss']:.4f}  " in capsys.readouterr().out


@pytest.mark.usefixtures("trained", "in_this_process")
def test_eval_refuses_another_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(folder / "run"), "model.d_model=8"]) == 1
    assert "a checkpoint fits only the model" in capsys.readouterr().err


@pytest.mark.usefixtures("trained", "in_this_process")
def test_eval_refuses_a_model_that_computes_something_else_unless_it_is_allowed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", str(folder / "run"), "model.norm_eps=0.01"]
    assert main(given) == 1
    said = capsys.readouterr().err
    assert "model.norm_eps=0.01, and the weights of " in said
    assert "model.norm_eps=1.0e-06, or allow it with --allow-change model" in said
    assert main([*given, "--allow-change", "model"]) == 0
    assert capsys.readouterr().out.endswith("(model.norm_eps 1.0e-06 -> 0.01)\n")


@pytest.mark.usefixtures("trained", "in_this_process")
def test_eval_says_that_documents_were_trained_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fraction = load(folder / "run" / "config.yaml").data.eval_fraction
    for now, label in ((fraction, ""), (2 * fraction, "  (trained on about 50% of these docum")):
        assert main(["eval", str(folder / "run"), f"data.eval_fraction={now}"]) == 0
        _, _, said = capsys.readouterr().out.partition("tokens ")
        assert said.lstrip("0123456789,").startswith(label or "\n")


@pytest.mark.usefixtures("trained", "in_this_process")
def test_an_edited_run_folder_is_neither_sampled_nor_evaluated_nor_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    config, tokenizer = run / "config.yaml", run / "tokenizer.json"
    commands = [
        ["eval", str(run)],
        ["sample", str(run), "7"],
        ["checkpoint", "export-weights", str(run), str(tmp_path / "hf")],
    ]
    for file, old, new, words in (
        (config, "theta: 500000.0", "theta: 10.0", "model.rope.theta=10.0, and the weights of "),
        (tokenizer, "{", "{ ", "tokenizer.json has sha256 "),
    ):
        text = file.read_text()
        file.write_text(text.replace(old, new, 1))
        assert file.read_text() != text
        for command in commands:
            assert main(command) == 1
            assert words in capsys.readouterr().err
        file.write_text(text)
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("trained", "in_this_process")
def test_sample_continues_the_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "2"):
        options = ["--tokens", "8", "--temperature", "1", "--seed", seed]
        assert main(["sample", str(folder / "run"), "7 squared", *options]) == 0
        said.append(capsys.readouterr().out)
    assert all(text.startswith("7 squared") for text in said)
    assert said[0] != said[1]


# SIGHUP comes when an ssh connection ends.
@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)]
)
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_signal_ends_a_run_after_its_step_with_exit_0(
    folder: Path, variables: dict[str, str], number: signal.Signals
) -> None:
    run_dir = folder / f"stopped by {number.name}"
    process = started(
        ["train", str(folder / "tiny.yaml"), f"run_dir={run_dir}", "train.steps=1000000"], variables
    )
    wait_for(process, "step 1/")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    steps = [line["step"] for line in metrics(run_dir)]
    assert steps == list(range(1, steps[-1] + 1))
    assert f"stopped after step {steps[-1]} of 1000000" in output
    assert f"checkpoints/step_{steps[-1]}" in output


def test_data_show_prints_a_step_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(folder / "tiny.yaml"), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 2: sequences 4 to 7, 4 rows of 32 positions")
    assert "squared is" in said


@pytest.mark.usefixtures("in_this_process")
def test_what_the_system_refuses_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 300
    assert main(["train", str(folder / "tiny.yaml"), f"run_dir={folder / long}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("olmo-jax: ")
    assert "write a shorter one" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_without_a_traceback(unbuffered: str) -> None:
    command = f"{sys.executable} -m olmo_jax.cli check {QUICKSTART} | true"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert done.stderr == ""
