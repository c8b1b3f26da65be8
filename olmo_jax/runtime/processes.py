"""Which process of how many this is, as a launcher, Slurm or a JobSet says. Imports no jax."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from olmo_jax.errors import UserError

COORDINATOR = "OLMO_JAX_COORDINATOR"
NUM_PROCESSES = "OLMO_JAX_NUM_PROCESSES"
PROCESS_INDEX = "OLMO_JAX_PROCESS_INDEX"
LOCAL_INDEX = "OLMO_JAX_LOCAL_INDEX"
DEVICES_PER_PROCESS = "OLMO_JAX_DEVICES_PER_PROCESS"
CONNECT_TIMEOUT = "OLMO_JAX_CONNECT_TIMEOUT_S"
LAUNCHER_PID = "OLMO_JAX_LAUNCHER_PID"

# An indexed Job of Kubernetes sets it in every pod.
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
# srun sets these in every task; a batch script or a shell of salloc has not all of them.
SLURM_TASK = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_LOCALID",
)

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job. `local_index` counts on its own node.

    `local_index` is None where a process has its node, or its container, to itself.
    """

    index: int = 0
    count: int = 1
    coordinator: str = ""
    local_index: int | None = None
    devices_per_process: int | None = None
    connect_timeout_s: float = 300.0

    @property
    def several(self) -> bool:
        """Say whether there are others to talk to."""
        return self.count > 1


def discover(variables: Mapping[str, str] | None = None) -> Processes:
    """Return what the environment says: our own variables, Slurm's, or a single process.

    Raises: UserError if variables are missing, are no numbers, or contradict each other.
    """
    variables = os.environ if variables is None else variables
    in_slurm = all(name in variables for name in SLURM_TASK)
    if NUM_PROCESSES in variables or (COORDINATOR in variables and not in_slurm):
        return _checked(_from_ours(variables))
    return _checked(_from_slurm(variables)) if in_slurm else Processes()


def _from_ours(variables: Mapping[str, str]) -> Processes:
    in_pod = PROCESS_INDEX not in variables and COMPLETION_INDEX in variables
    index = COMPLETION_INDEX if in_pod else PROCESS_INDEX
    missing = [name for name in (COORDINATOR, NUM_PROCESSES, index) if name not in variables]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set, but others of {COORDINATOR}, {NUM_PROCESSES} and "
            f"{PROCESS_INDEX} (or {COMPLETION_INDEX}) are; a process needs all three or none; "
            "set them, or unset the others"
        )
    return Processes(
        index=_number(variables, index),
        count=_number(variables, NUM_PROCESSES),
        coordinator=variables[COORDINATOR],
        local_index=_number(variables, LOCAL_INDEX) if LOCAL_INDEX in variables else None,
        devices_per_process=_devices_per_process(variables),
        connect_timeout_s=_timeout(variables),
    )


def _from_slurm(variables: Mapping[str, str]) -> Processes:
    # A port that two jobs on one node hardly share, above the range that sockets are given.
    port = 61_440 + _number(variables, "SLURM_JOB_ID") % 4096
    return Processes(
        index=_number(variables, "SLURM_PROCID"),
        count=_number(variables, "SLURM_STEP_NUM_TASKS"),
        coordinator=variables.get(COORDINATOR)
        or f"{first_host(variables['SLURM_STEP_NODELIST'])}:{port}",
        local_index=_number(variables, "SLURM_LOCALID"),
        devices_per_process=_devices_per_process(variables),
        connect_timeout_s=_timeout(variables),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, as of "node[007-009,012],other"."""
    head, bracket, rest = nodes.partition("[")
    if "," in head or not bracket:
        return head.partition(",")[0]
    numbers, _, tail = rest.partition("]")
    return head + numbers.replace("-", ",").partition(",")[0] + tail.partition(",")[0]


def _devices_per_process(variables: Mapping[str, str]) -> int | None:
    if DEVICES_PER_PROCESS not in variables:
        return None
    return _number(variables, DEVICES_PER_PROCESS)


def _timeout(variables: Mapping[str, str]) -> float:
    given = variables.get(CONNECT_TIMEOUT, "300")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{CONNECT_TIMEOUT}={given} is no number of seconds above 0; write 300")
    return seconds


def _number(variables: Mapping[str, str], name: str) -> int:
    given = variables[name]
    if not given.isdecimal():
        raise UserError(f"{name}={given} is no whole number from 0; a launcher sets it; unset it")
    return int(given)


def _checked(found: Processes) -> Processes:
    if not found.index < found.count:
        raise UserError(
            f"process index {found.index} of {found.count} processes: indices go from 0 to the "
            f"number of processes - 1; start as many as {NUM_PROCESSES} says, each with its own"
        )
    host, _, port = found.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise UserError(
            f"{COORDINATOR}={found.coordinator} is no address; it is host:port of process 0, with "
            "a port from 1 to 65535; write 10.0.0.1:61440, for example"
        )
    return found


def die_with_launcher() -> None:
    """Ask Linux to kill this process when the launcher that started it dies, however it dies.

    A killed launcher could not do it, and processes left behind would keep devices and port.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    # It may have died before this line: the kernel does not tell of that any more.
    if os.getppid() != int(launcher):
        exit_process(1)


def exit_process(code: int) -> NoReturn:
    """End at once.

    An interpreter that ends normally waits for the other processes (up to 5 minutes), which wait
    for this one, and it aborts on a thread that is inside XLA's compiler.
    """
    for stream in (sys.stdout, sys.stderr):
        # Its reader may have gone.
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def exit_with_traceback(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> NoReturn:
    """Print an exception that nobody has caught, and end at once; for sys.excepthook."""
    traceback.print_exception(kind, error, where)
    exit_process(1)
