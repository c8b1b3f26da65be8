"""Connects the processes of a job: jax.distributed, in bounded time, with messages for people."""

import socket
import sys
import threading
import time
from typing import Any

import jax
from jax._src import distributed

from olmo_jax.errors import UserError
from olmo_jax.runtime import environment
from olmo_jax.runtime.processes import COORDINATOR, NUM_PROCESSES, Processes, exit_with_traceback
from olmo_jax.runtime.stop_signal import keep_handlers

PREFIX = "olmo_jax"
LOOPBACK = ("127.0.0.1", "localhost")
# jax aborts the process where it gives up by itself; the messages here must come first.
MARGIN_S = 60.0


def connect(processes: Processes) -> None:
    """Join the other processes of the job, before any device is touched; alone there is nothing.

    Raises: UserError if the coordinator cannot be reached, not all processes come in time, or they
    were told different numbers of processes.
    """
    if not processes.several:
        return
    # From here an exception must not end in the interpreter's own, orderly exit.
    sys.excepthook = exit_with_traceback
    deadline = time.monotonic() + processes.connect_timeout_s
    if processes.index == 0:
        _refuse_taken_port(processes.coordinator)
    else:
        _wait_for_coordinator(processes, deadline)
    with keep_handlers():
        _initialize(processes, deadline)
    _check_counts(processes)


def is_connected() -> bool:
    """Say whether this process has joined others. Touches no device, unlike jax.process_count."""
    return distributed.global_state.client is not None


def client() -> Any:
    """Return the client of the coordination service, which lives in process 0.

    jax shows neither a barrier with a limit nor the key-value store; Orbax uses the same object.
    """
    found = distributed.global_state.client
    if found is None:
        raise RuntimeError("connect() must run before this process talks to others")
    return found


def _refuse_taken_port(coordinator: str) -> None:
    """Look whether process 0 can listen: two gRPC servers of one user would share a port.

    Raises: UserError if it cannot.
    """
    host, _, port = coordinator.rpartition(":")
    address = host if host in LOOPBACK else ""
    with _any_socket() if address == "" else socket.socket(socket.AF_INET) as probe:
        # As gRPC does: connections of an earlier job that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(port)))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {port} ({error.strerror}): {COORDINATOR}="
                f"{coordinator} is where the others reach it; end what listens there (ss -ltnp "
                f"'sport = :{port}' shows it), or set {COORDINATOR} to a free port, the same for "
                "all; launch local takes another one each time, so start it again"
            ) from None


def _any_socket() -> socket.socket:
    """Return a socket of IPv6, as gRPC listens on, or of IPv4 where the kernel has no other."""
    try:
        return socket.socket(socket.AF_INET6)
    except OSError:
        return socket.socket(socket.AF_INET)


def _wait_for_coordinator(processes: Processes, deadline: float) -> None:
    host, _, port = processes.coordinator.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise UserError(
                f"process {processes.index} of {processes.count}: the coordinator "
                f"{processes.coordinator} cannot be reached ({reason}) within "
                f"{processes.connect_timeout_s:g} s; process 0 listens there; look into its log, "
                "and whether this host may connect to that port"
            )
        time.sleep(0.1)


def _initialize(processes: Processes, deadline: float) -> None:
    failure: list[BaseException] = []

    def run() -> None:
        try:
            jax.distributed.initialize(
                processes.coordinator,
                processes.count,
                processes.index,
                local_device_ids=environment.local_devices(processes),
                cluster_detection_method="deactivate",
                initialization_timeout=int(processes.connect_timeout_s + MARGIN_S),
                coordinator_bind_address=_bind_address(processes.coordinator),
            )
        except BaseException as error:  # noqa: BLE001 it is raised below, in the thread that waits
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.1))
    if failure:
        raise UserError(
            f"process {processes.index} of {processes.count} cannot start at "
            f"{processes.coordinator}: {failure[0]}"
        )
    if thread.is_alive():
        raise UserError(
            f"process {processes.index}: not all of the {processes.count} processes came to "
            f"{processes.coordinator} within {processes.connect_timeout_s:g} s; {NUM_PROCESSES} "
            "is the number of processes that are started; look into the logs of the others"
        )


def _bind_address(coordinator: str) -> str | None:
    """Keep a job of one machine off the network; None lets jax listen on all interfaces."""
    return coordinator if coordinator.rpartition(":")[0] in LOOPBACK else None


def _check_counts(processes: Processes) -> None:
    """Compare what this process was told with what process 0 was told."""
    key = f"{PREFIX}/num_processes"
    if processes.index == 0:
        client().key_value_set(key, str(processes.count))
        return
    there = int(client().blocking_key_value_get(key, int(processes.connect_timeout_s * 1000)))
    if there != processes.count:
        raise UserError(
            f"process {processes.index} was told of {processes.count} processes and process 0 of "
            f"{there}; {NUM_PROCESSES} must be the same everywhere; set it to what is started"
        )
