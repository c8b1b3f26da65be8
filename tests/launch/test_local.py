"""Processes started together end together, and whoever waits learns which rank was it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from olmo_jax.cli import main
from olmo_jax.config import Config
from olmo_jax.launch import local
from olmo_jax.runtime import environment
from olmo_jax.runtime.watchdog import HUNG

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")

LAUNCH = """
import sys
from pathlib import Path
from olmo_jax.config import Config
from olmo_jax.launch.local import launch
from olmo_jax.runtime.processes import exit_process
number, logs, *command = sys.argv[1:]
config = Config(mesh={"data": 4})
exit_process(launch([sys.executable, *command], config, num_processes=int(number), logs=Path(logs)))
"""


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of a user's shell: nothing of the test run's own."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return {**own, "PYTHONPATH": str(ROOT)}


def command_of(logs: Path, number: int, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", LAUNCH, str(number), str(logs), *command]


def launched(
    logs: Path, command: Sequence[str], variables: dict[str, str], number: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end."""
    return subprocess.run(
        command_of(logs, number, command),
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def started(variables: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a launcher and waits until both ranks have said `words`."""
    processes: list[subprocess.Popen[str]] = []

    def start(logs: Path, command: Sequence[str], words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command_of(logs, 2, command),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout is not None
        said = (line for line in process.stdout if words in line)
        assert next(said, None)
        assert next(said, None)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def python(code: str) -> list[str]:
    """Return a rank that needs no jax; `rank` is its number."""
    return ["-c", f"import os, sys, time; rank = os.environ['OLMO_JAX_PROCESS_INDEX']\n{code}"]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pids(logs: Path) -> Iterator[int]:
    for path in sorted(logs.glob("rank_*.log")):
        found = re.search(r"pid (\d+)", path.read_text())
        assert found is not None
        yield int(found[1])


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_processes_find_each_other_and_miss_who_does_not_come(
    tmp_path: Path, variables: dict[str, str], number: int
) -> None:
    done = launched(tmp_path / "logs", [str(JOB), str(tmp_path), "sum"], variables, number)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(number):
        said = f"rank {rank} of {number}: 4 devices, sum 6"
        assert f"[{rank}] {said}\n" in done.stdout
        assert f"{said}\n" in (tmp_path / "logs" / f"rank_{rank}.log").read_text()
    assert f"[0] barrier 'saving step 7': rank {number - 1} did not come within" in done.stdout


# 0 is the coordinator: what the others need to name it must not hang with it.
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.matrix)])
def test_a_rank_that_sleeps_for_ever_ends_the_job_and_is_named(
    tmp_path: Path, variables: dict[str, str], rank: int
) -> None:
    before = time.monotonic()
    command = [str(JOB), str(tmp_path), "hang", str(rank), "sleep"]
    done = launched(tmp_path / "logs", command, variables)
    assert done.returncode == HUNG, done.stdout + done.stderr
    # The limit is 1 s; starting takes the most of it.
    assert time.monotonic() - before < 60
    last = done.stderr.strip().splitlines()[-1]
    assert f"exit code {HUNG}" in last
    assert f"rank {rank} hangs: last step 2, now in 'step 3' at launch/job.py" in last
    stacks = (tmp_path / "logs" / f"stacks_rank_{rank}.txt").read_text()
    assert re.search(r"job\.py\", line \d+ in hang", stacks)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (1, "rank 1 hangs: the process is stopped or gone"),
        (0, "rank 0, where the ranks show their progress, does not answer; rank 0 hangs"),
    ],
)
def test_a_process_that_is_stopped_is_named_by_the_other(
    tmp_path: Path, variables: dict[str, str], rank: int, words: str
) -> None:
    command = [str(JOB), str(tmp_path), "hang", str(rank), "stop"]
    done = launched(tmp_path / "logs", command, variables)
    assert done.returncode == HUNG, done.stdout + done.stderr
    assert f"rank {1 - rank} ended with exit code {HUNG}" in done.stderr
    assert words in done.stderr


def test_a_job_can_be_ended_before_its_loop_listens(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """jax.distributed takes SIGTERM for its own; a run that compiles would not end."""
    process = started(tmp_path / "logs", [str(JOB), str(tmp_path), "ready"], "ready")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended with signal SIGTERM" in errors


@pytest.mark.parametrize(
    ("death", "code", "how"),
    [
        ("os.kill(os.getpid(), 9)", 137, "signal SIGKILL"),
        ("print('olmo-jax: no room'); sys.exit(3)", 3, "exit code 3"),
    ],
)
def test_one_rank_that_dies_ends_all_and_is_named(
    tmp_path: Path, variables: dict[str, str], death: str, code: int, how: str
) -> None:
    # The other one does not hear a polite signal, as one that waits in a collective.
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    rank = (
        f"{deaf if code == 137 else ''}"
        "print('pid', os.getpid(), flush=True)\n"
        f"if rank == '1': time.sleep(0.3); {death}\n"
        "time.sleep(1000)"
    )
    done = launched(tmp_path, python(rank), variables)
    assert done.returncode == code
    assert f"olmo-jax: rank 1 ended with {how}" in done.stderr
    assert f"its log is {tmp_path}/rank_1.log" in done.stderr
    assert ("no room" in done.stderr) == (code == 3)
    assert not any(is_alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_a_signal_reaches_every_rank_once(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    rank = (
        "import signal; got = []\n"
        f"signal.signal({int(number)}, lambda *_: got.append(1))\n"
        "print('listening', flush=True)\n"
        "while not got: time.sleep(0.02)\n"
        "time.sleep(0.3); print('got', len(got))"
    )
    process = started(tmp_path, python(rank), "listening")
    # As a terminal sends it: to all processes of the launcher's group.
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "[0] got 1\n" in output
    assert "[1] got 1\n" in output


def test_nothing_is_left_when_the_launcher_is_killed(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    rank = (
        "from olmo_jax.runtime.processes import die_with_launcher; die_with_launcher()\n"
        "print('pid', os.getpid(), flush=True); time.sleep(1000)"
    )
    process = started(tmp_path, python(rank), "pid")
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_logs_of_a_second_start_follow_the_first(tmp_path: Path, variables: dict[str, str]) -> None:
    for _ in range(2):
        assert launched(tmp_path, python("print('hello from', rank)"), variables).returncode == 0
    assert (tmp_path / "rank_1.log").read_text().count("hello from 1\n") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--processes", "3", "--", "train", QUICKSTART], 1, "3 processes for a mesh of 8 CPU"),
        (
            ["--processes", "2", "--devices-per-process", "3", "--", "train", QUICKSTART],
            1,
            "--processes 2 x --devices-per-process 3 = 6 devices, but mesh.* asks for 8",
        ),
        (["--processes", "2", "--", "check", QUICKSTART], 1, "it starts `train`, and no other"),
        (["--processes", "2", "--", "train", "no.yaml"], 1, "no.yaml cannot be read"),
        (
            ["--processes", "2", "--", "train", QUICKSTART, "run_dir=gs://bucket/run"],
            1,
            "write a folder that all processes see",
        ),
        (["--processes", "2", "--", "train"], 2, "the following arguments are required: CONFIG"),
        (["--processes", "0", "--", "train", QUICKSTART], 2, "0 is below 1"),
        (["--", "train", QUICKSTART], 2, "the following arguments are required: --processes"),
    ],
)
def test_a_mistake_is_told_once_and_starts_nothing(
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "runs_on_gpu", lambda *_: False)
    monkeypatch.setattr(local.subprocess, "Popen", None)
    try:
        found = main(["launch", "local", *arguments])
    except SystemExit as end:
        found = end.code
    assert found == code
    assert capsys.readouterr().err.count(words) == 1


def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "runs_on_gpu", lambda *_: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["launch", "local", "--processes", "4", "--", "train", QUICKSTART]) == 1
    assert "--processes 4 x 1 GPUs = 4, but this machine shows 2" in capsys.readouterr().err
    local._check_devices(Config(), 2, 1)
