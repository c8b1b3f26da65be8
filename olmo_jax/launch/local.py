"""Starts the processes of a job on this machine, and ends them together."""

import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from olmo_jax.config import Config
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import num_devices_wanted
from olmo_jax.runtime import environment, processes
from olmo_jax.runtime.stop_signal import heard
from olmo_jax.runtime.streams import complain

HOST = "127.0.0.1"
# What a rank may take to end once another one has died: it waits for that one, and will not end.
GRACE_S = 3.0
OWN_LINES = b"olmo-jax: "


@dataclass
class Rank:
    """One process of the job, its log, and the last thing that it said in our name."""

    index: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    said: str = ""
    threads: list[threading.Thread] = field(default_factory=list)


def launch(
    command: Sequence[str],
    config: Config,
    *,
    num_processes: int,
    devices_per_process: int | None = None,
    logs: Path | None = None,
) -> int:
    """Run `command` in `num_processes` processes to their end; `config` is what it will load.

    Returns 0, or the exit code of the rank that failed first (128 and its number for a signal).

    Raises: UserError if the machine has too few GPUs, or the logs cannot be written.
    """
    _check_devices(config, num_processes, devices_per_process)
    logs = logs or Path(config.run_dir) / "logs"
    variables = _variables(num_processes, devices_per_process)
    print(f"olmo-jax: {num_processes} processes, logs in {logs}/rank_*.log", flush=True)
    with _running(command, variables, num_processes, logs) as ranks, _forwarding(ranks):
        return _wait(ranks)


def _check_devices(config: Config, num_processes: int, devices_per_process: int | None) -> None:
    if environment.runs_on_gpu(config.mesh.platform):
        wanted, there = num_processes * (devices_per_process or 1), environment.num_visible_gpus()
        if wanted > there:
            raise UserError(
                f"--processes {num_processes} x {devices_per_process or 1} GPUs = {wanted}, but "
                f"this machine shows {there}; a process has one GPU, or --devices-per-process of "
                f"them; start at most {there} processes, or write mesh.platform=cpu"
            )
        return
    sizes = [size for _, size in config.mesh]
    if devices_per_process is None:
        environment.cpu_devices_here(
            num_devices_wanted(config.mesh), processes.Processes(0, num_processes)
        )
    elif -1 not in sizes and (total := num_devices_wanted(config.mesh)) != (
        there := num_processes * devices_per_process
    ):
        raise UserError(
            f"--processes {num_processes} x --devices-per-process {devices_per_process} = {there} "
            f"devices, but mesh.* asks for {total}; they must be equal; leave "
            "--devices-per-process out, or write other mesh.* sizes"
        )


def _variables(num_processes: int, devices_per_process: int | None) -> dict[str, str]:
    """Return what every process is told; its own index comes on top."""
    own = {
        processes.COORDINATOR: f"{HOST}:{free_port()}",
        processes.NUM_PROCESSES: str(num_processes),
        processes.LAUNCHER_PID: str(os.getpid()),
        # A line of a rank must be in its log when the rank is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if devices_per_process is not None:
        own[processes.DEVICES_PER_PROCESS] = str(devices_per_process)
    return {**os.environ, **own}


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def _running(
    command: Sequence[str], variables: Mapping[str, str], num_processes: int, logs: Path
) -> Iterator[list[Rank]]:
    """Start all processes; at the end none is left, whatever happened."""
    ranks: list[Rank] = []
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for index in range(num_processes):
            rank = _start(command, variables, index, logs / f"rank_{index}.log")
            ranks.append(rank)
        yield ranks
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
        for rank in ranks:
            for thread in rank.threads:
                # A process that a rank has started may still hold its output.
                thread.join(GRACE_S)
            rank.log.close()


def _start(command: Sequence[str], variables: Mapping[str, str], index: int, path: Path) -> Rank:
    own = {processes.PROCESS_INDEX: str(index), processes.LOCAL_INDEX: str(index)}
    log = path.open("ab")
    log.write(f"--- {shlex.join(command)} (rank {index})\n".encode())
    log.flush()
    # In a session of its own: a terminal's Ctrl-C reaches the launcher alone, which passes it on.
    process = subprocess.Popen(
        command,
        env={**variables, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    rank = Rank(index, process, log)
    reader = threading.Thread(target=_copy_output, args=(rank,), daemon=True)
    rank.threads.append(reader)
    reader.start()
    return rank


def _copy_output(rank: Rank) -> None:
    """Write each line of a rank to its log, and to our output with the rank before it."""
    assert rank.process.stdout is not None
    for line in rank.process.stdout:
        rank.log.write(line)
        rank.log.flush()
        if line.startswith(OWN_LINES):
            rank.said = line.decode(errors="replace").strip()
        whole = f"[{rank.index}] ".encode() + line.removesuffix(b"\n") + b"\n"
        _print(whole)


def _print(line: bytes) -> None:
    # One write a line keeps lines of several ranks apart. The job outlives who reads its output.
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except (OSError, ValueError):
        pass


@contextmanager
def _forwarding(ranks: Sequence[Rank]) -> Iterator[None]:
    """Pass each signal that stops a run on to all ranks, once."""

    def forward(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    before: dict[int, Any] = {number: signal.signal(number, forward) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[Rank]) -> int:
    """Wait until all have ended; once one has failed, end the others and say which it was."""
    ended: queue.SimpleQueue[Rank] = queue.SimpleQueue()
    # A thread each: the order in which they die tells the cause from its consequences.
    for rank in ranks:
        waiter = threading.Thread(target=_report_end, args=(rank, ended), daemon=True)
        rank.threads.append(waiter)
        waiter.start()
    for _ in ranks:
        rank = ended.get()
        if rank.process.returncode != 0:
            return _end_others(rank, ranks)
    return 0


def _report_end(rank: Rank, ended: "queue.SimpleQueue[Rank]") -> None:
    rank.process.wait()
    ended.put(rank)


def _end_others(failed: Rank, ranks: Sequence[Rank]) -> int:
    others = [rank for rank in ranks if rank.process.poll() is None]
    for rank in others:
        rank.process.terminate()
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in others):
        time.sleep(0.05)
    for rank in others:
        if rank.process.poll() is None:
            rank.process.kill()
    for thread in failed.threads:
        thread.join(GRACE_S)
    complain(f"olmo-jax: {_failure(failed)}")
    code = failed.process.returncode
    return code if code > 0 else 128 - code


def _failure(failed: Rank) -> str:
    code = failed.process.returncode
    how = f"exit code {code}" if code > 0 else f"signal {_signal_name(-code)}"
    said = f": {failed.said.removeprefix('olmo-jax: ')}" if failed.said else ""
    return (
        f"rank {failed.index} ended with {how}, and the others were ended; its log is "
        f"{failed.log.name}{said}"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
