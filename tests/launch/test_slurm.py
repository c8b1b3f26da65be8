"""The batch script as rendered, and what it does under a Slurm of shell scripts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olmo_jax.cli import main
from olmo_jax.config import Config
from olmo_jax.config_file import load
from olmo_jax.errors import UserError
from olmo_jax.launch import slurm
from olmo_jax.launch.slurm import Job, render

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"
GOLDEN = HERE / "golden" / "job.sbatch"
JOB = Job(
    nodes=2,
    time="1-12:00:00",
    job_name="moe-7b",
    partition="gpu,big",
    account="project.1",
    constraint="h100|h200",
    cpus_per_task=12,
    max_restarts=2,
    folder="/home/me/it's here",
    python="/opt/env/bin/python",
    env=["NCCL_DEBUG=INFO", "NOTE=$(id) `id` 'x'"],
    setup=["module load cuda/13"],
)
OVERRIDES = ["data.sources=[{path: /data/$USER/a b}]", "seed=1"]


def rendered(job: Job = JOB, overrides: Sequence[str] = OVERRIDES) -> str:
    return render(load(CONFIG, overrides), CONFIG.read_text(), overrides, job)


def test_the_script_is_the_one_that_was_looked_at() -> None:
    assert rendered() == GOLDEN.read_text()


# Nothing in it is the shell's; its last line has no end.
TEXT = "seed: 1\n# $HOME `id` \\ {x} é\nEND_OF_CONFIG\nlast: 2"


def small(tmp_path: Path, max_restarts: int = 2) -> Path:
    """Write the script of a job whose run folder has a name that asks for quotes."""
    run_dir = tmp_path / "run's $HOME"
    job = replace(JOB, folder=str(tmp_path), max_restarts=max_restarts, setup=())
    path = tmp_path / "job.sbatch"
    config = load(CONFIG, [f"run_dir={run_dir}"])
    path.write_text(render(config, TEXT, ["a=$X b"], job))
    return path


# srun answers a TERM with a KILL to its tasks.
SRUN = """
bash task "$@" &
task=$!
echo $task > task.pid
trap 'echo "srun: forcing job termination"; kill -KILL $task' TERM
wait $task
code=$?
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""
# With a signal and a job, scancel signals the tasks of its steps, and nothing else.
SCANCEL = '[ "$*" = "--signal=TERM 4100" ] && kill -TERM "$(cat task.pid)"'


def start(tmp_path: Path, path: Path, task: str) -> subprocess.Popen[str]:
    """Start the script with `task` as what srun starts; scontrol notes what it is asked."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tmp_path / "task").write_text(task)
    for name, text in {
        "srun": SRUN,
        "scancel": SCANCEL,
        "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> asked; fi',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    own = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4100",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    return subprocess.Popen(
        ["bash", str(path)], env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(tmp_path: Path, process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit code, the output, and what was asked of scontrol."""
    output, _ = process.communicate(timeout=30)
    asked = tmp_path / "asked"
    return process.returncode, output, asked.read_text() if asked.exists() else ""


def test_a_run_to_its_end_is_the_end(tmp_path: Path) -> None:
    show = 'for word in "$@"; do echo "<$word>"; done; echo "$OLMO_JAX_COORDINATOR"; echo "$NOTE"'
    code, output, asked = ended(tmp_path, start(tmp_path, small(tmp_path), show))
    assert (code, asked) == (0, "")
    log = f"<--output={tmp_path}/run's $HOME/logs/rank_%t.log>"
    command = [
        "<--cpus-per-task=12>",
        log,
        "</opt/env/bin/python>",
        "<-m>",
        "<olmo_jax.cli>",
        "<train>",
        f"<{tmp_path}/run's $HOME/logs/config_4100.yaml>",
    ]
    assert output.splitlines()[2:] == [*command, "<a=$X b>", "node7:61444", "$(id) `id` 'x'"]


def test_the_job_runs_the_config_that_was_submitted(tmp_path: Path) -> None:
    """Each job has a copy of its own, and writes it again when it comes back."""
    path = small(tmp_path)
    show = 'for word in "$@"; do case "$word" in *.yaml) cat "$word"; rm "$word";; esac; done'
    for _ in range(2):
        code, output, _ = ended(tmp_path, start(tmp_path, path, show))
        assert (code, output) == (0, f"{TEXT}\n")


def test_failures_in_a_row_bring_the_job_back_a_limited_number_of_times(tmp_path: Path) -> None:
    path = small(tmp_path)
    for count in (1, 2):
        code, output, asked = ended(tmp_path, start(tmp_path, path, "exit 124"))
        assert code == 124
        assert f"exit code 124; restart {count} of 2" in output
        assert asked == "requeue 4100\n" * count
    code, output, asked = ended(tmp_path, start(tmp_path, path, "exit 124"))
    assert (code, asked) == (124, "requeue 4100\n" * 2)
    assert "failure 3 in a row; 2 restarts are allowed" in output


def test_the_last_messages_of_a_failure_are_those_of_this_attempt(tmp_path: Path) -> None:
    path = small(tmp_path)
    for text in ("rank 1 hangs: in a sleep", "the disk is full"):
        log = '"run\'s \\$HOME/logs/rank_1.log"'
        task = f"printf 'step 7\\nolmo-jax: {text}\\n' >> {log}; exit 1"
        _, output, _ = ended(tmp_path, start(tmp_path, path, task))
        said, last = output.splitlines()
        assert said == f"olmo-jax: {text}"
        assert "exit code 1; restart" in last


def test_a_success_forgets_earlier_failures(tmp_path: Path) -> None:
    path = small(tmp_path, max_restarts=1)
    for task, code in (("exit 1", 1), ("exit 0", 0), ("exit 1", 1)):
        found, output, asked = ended(tmp_path, start(tmp_path, path, task))
        assert found == code
    assert asked == "requeue 4100\n" * 2
    assert "restart 1 of 1" in output


@pytest.mark.parametrize("task_code", [0, 143])
@pytest.mark.parametrize(
    ("number", "requeued", "words"),
    [
        (signal.SIGUSR1, "requeue 4100\n", "stopped before the end of the time, exit code"),
        (signal.SIGTERM, "", "stopped from outside; exit code"),
    ],
)
def test_the_end_of_the_time_brings_the_job_back_and_a_term_does_not(
    tmp_path: Path, number: signal.Signals, requeued: str, words: str, task_code: int
) -> None:
    stop = f"trap 'sleep 0.2; echo saved; exit {task_code}' TERM"
    task = f"{stop}; touch up; while true; do sleep 0.05; done"
    process = start(tmp_path, small(tmp_path), task)
    deadline = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    code, output, asked = ended(tmp_path, process)
    assert (code, asked) == (task_code, requeued)
    assert "saved" in output
    assert f"{words} {task_code}" in output
    # No failure, which would be counted.
    assert not list(tmp_path.glob("run*/logs/failures_*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_name": "a b"}, "--job-name 'a b' has characters"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "--partition 'gpu\\n#SBATCH --uid=0' has"),
        ({"account": "x; rm"}, "--account 'x; rm' has characters"),
        ({"time": "1 day"}, "--time '1 day' has characters"),
        ({"nodes": 3}, "--nodes 3 x --gpus-per-node 8 = 24 devices, but mesh.data=2 x mesh.expert"),
        ({"env": ["A B=1"]}, "--env A B=1: it takes NAME=VALUE"),
    ],
)
def test_what_slurm_would_not_take_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        rendered(replace(JOB, **change))
    assert words in str(raised.value)


@pytest.mark.parametrize("run_dir", ["/runs/100%", '/runs/"x"'])
def test_a_run_folder_whose_logs_slurm_could_not_write_is_refused(run_dir: str) -> None:
    with pytest.raises(UserError, match="run_dir="):
        render(Config(run_dir=run_dir), "", [], Job(nodes=1, gpus_per_node=1))


@pytest.mark.parametrize("folder", ["/home/100%", '/home/"me"'])
def test_a_folder_whose_logs_slurm_could_not_write_is_refused(folder: str) -> None:
    job = Job(nodes=1, gpus_per_node=1, folder=folder)
    with pytest.raises(UserError, match=r"run_dir='runs/x' puts the logs into .* absolute run_dir"):
        render(Config(run_dir="runs/x"), "", [], job)
    render(Config(run_dir="/runs/x"), "", [], job)


def test_a_mesh_with_an_open_axis_takes_what_divides() -> None:
    rendered(replace(JOB, nodes=5), ["mesh.data=-1"])
    with pytest.raises(UserError, match=r"= 12 devices, but mesh\.data=-1 x mesh\.expert=8"):
        rendered(replace(JOB, nodes=3, gpus_per_node=4), ["mesh.data=-1"])


def test_dry_run_prints_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.subprocess, "run", None)
    arguments = ["launch", "slurm", "--nodes", "2", "--dry-run", str(CONFIG)]
    assert main([*arguments, f"run_dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=olmo-jax\n")
    assert not (tmp_path / "run").exists()


def test_the_job_expands_its_home_folder_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    arguments = ["launch", "slurm", "--nodes", "2", "--dry-run", str(CONFIG)]
    assert main([*arguments, "run_dir=~/run", "checkpoint.init_from=~/old"]) == 0
    script = capsys.readouterr().out
    assert "train \"$config\" 'run_dir=~/run' 'checkpoint.init_from=~/old'" in script
    # Slurm opens the logs before the job runs, and knows no `~`.
    assert '--output="/home/me/run/logs/slurm_%j.log"' in script


def test_the_script_is_handed_to_sbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    arguments = ["launch", "slurm", "--nodes", "2", "--python", str(python), str(CONFIG)]
    arguments += [f"run_dir={tmp_path}/run"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(arguments) == 1
    assert "sbatch is not on the PATH" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "Submitted $1"; exit $CODE\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("CODE", "0")
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.endswith(f"Submitted {tmp_path}/run/logs/job.sbatch\n")
    assert (tmp_path / "run" / "logs" / "job.sbatch").read_text() in output
    monkeypatch.setenv("CODE", "3")
    assert main(arguments) == 1
    assert "failed with exit code 3: Submitted" in capsys.readouterr().err


def test_an_interpreter_without_cuda_is_refused_before_anything_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "run_client", None)
    arguments = ["launch", "slurm", "--nodes", "2", str(CONFIG), f"run_dir={tmp_path}/run"]
    python = tmp_path / "python"
    for text, words in {
        "": "No such file or directory",
        "echo \"ModuleNotFoundError: No module named 'jax'\" >&2; exit 1": "No module named 'jax'",
        f'exec {sys.executable} "$@"': "its jax has no CUDA plugin",
    }.items():
        if text:
            python.write_text(f"#!/bin/sh\n{text}\n")
            python.chmod(0o755)
        assert main([*arguments, "--python", str(python)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"olmo-jax: --python {python}: the job would not find its GPUs")
        assert words in said
    assert not (tmp_path / "run").exists()


def test_the_nodes_get_the_interpreter_that_has_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "GPU_PYTHON", tmp_path / "python")
    assert slurm.default_python() == sys.executable
    (tmp_path / "python").touch()
    assert slurm.default_python() == str(tmp_path / "python")
    monkeypatch.setattr(slurm, "has_gpu_plugin", lambda: True)
    assert slurm.default_python() == sys.executable


def test_a_job_with_gpus_does_not_train_on_cpu_devices() -> None:
    with pytest.raises(UserError, match=r"mesh\.platform=cpu, but a job on a cluster asks for"):
        rendered(overrides=["mesh.platform=cpu"])
