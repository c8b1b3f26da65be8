"""What a process is told of its job, by whom, and what is wrong with it."""

import subprocess
import sys

import pytest

from olmo_jax.errors import UserError
from olmo_jax.runtime.processes import Processes, discover, first_host

OURS = {
    "OLMO_JAX_COORDINATOR": "10.0.0.1:1234",
    "OLMO_JAX_NUM_PROCESSES": "4",
    "OLMO_JAX_PROCESS_INDEX": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_LOCALID": "1",
}


def test_a_process_alone_needs_nothing() -> None:
    assert discover({}) == Processes(index=0, count=1)
    assert not discover({}).several


def test_our_variables_come_first() -> None:
    found = discover({**SLURM, **OURS, "OLMO_JAX_LOCAL_INDEX": "1"})
    assert found == Processes(3, 4, "10.0.0.1:1234", local_index=1)


def test_a_pod_has_its_completion_index() -> None:
    given = {**OURS, "JOB_COMPLETION_INDEX": "2"}
    del given["OLMO_JAX_PROCESS_INDEX"]
    assert discover(given) == Processes(2, 4, "10.0.0.1:1234", local_index=None)


def test_a_task_of_srun_knows_all_by_itself() -> None:
    assert discover(SLURM) == Processes(9, 16, "gpu007:61444", local_index=1)
    given = {**SLURM, "OLMO_JAX_COORDINATOR": "head:99"}
    assert discover(given).coordinator == "head:99"


def test_a_batch_script_outside_of_srun_is_a_process_alone() -> None:
    given = {name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NUM_TASKS"}
    assert discover(given) == Processes()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[007-009,012],other", "node007"),
        ("node[3,5]", "node3"),
        ("a-[01-02]-ib,b[1-2]", "a-01-ib"),
        ("login,node[1-2]", "login"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"OLMO_JAX_PROCESS_INDEX": "4"}, "process index 4 of 4 processes"),
        ({"OLMO_JAX_PROCESS_INDEX": "one"}, "OLMO_JAX_PROCESS_INDEX=one is no whole number"),
        ({"OLMO_JAX_NUM_PROCESSES": "-1"}, "OLMO_JAX_NUM_PROCESSES=-1 is no whole number"),
        ({"OLMO_JAX_COORDINATOR": "10.0.0.1"}, "OLMO_JAX_COORDINATOR=10.0.0.1 is no address"),
        ({"OLMO_JAX_COORDINATOR": "host:0"}, "port from 1 to 65535"),
        ({"OLMO_JAX_CONNECT_TIMEOUT_S": "soon"}, "OLMO_JAX_CONNECT_TIMEOUT_S=soon"),
        ({"OLMO_JAX_CONNECT_TIMEOUT_S": "nan"}, "OLMO_JAX_CONNECT_TIMEOUT_S=nan"),
        ({"OLMO_JAX_DEVICES_PER_PROCESS": "x"}, "OLMO_JAX_DEVICES_PER_PROCESS=x"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        discover({**OURS, **change})
    assert words in str(raised.value)


@pytest.mark.parametrize("name", OURS)
def test_a_missing_variable_is_named(name: str) -> None:
    given = {key: value for key, value in OURS.items() if key != name}
    with pytest.raises(UserError) as raised:
        discover(given)
    assert f"{name}" in str(raised.value).partition(" not set")[0]


def test_an_exception_ends_the_process_at_once() -> None:
    """The interpreter's own exit would wait for the others, which wait for this one."""
    code = (
        "import atexit, sys; from olmo_jax.runtime.processes import exit_with_traceback\n"
        "atexit.register(print, 'an orderly exit')\n"
        "sys.excepthook = exit_with_traceback\n"
        "raise ValueError('as it was')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ValueError: as it was" in done.stderr
    assert "an orderly exit" not in done.stdout
