"""Joining the other processes, and the messages where that fails."""

import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from olmo_jax.errors import UserError
from olmo_jax.launch.local import free_port
from olmo_jax.runtime import connection
from olmo_jax.runtime.processes import Processes


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what `connect` does to this process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def test_a_process_alone_starts_no_service() -> None:
    connection.connect(Processes())
    assert not connection.is_connected()


def test_a_coordinator_that_nobody_reaches_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        connection.connect(Processes(1, 2, address, connect_timeout_s=0.3))
    assert f"the coordinator {address} cannot be reached" in str(raised.value)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("host", ["127.0.0.1", "node7"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_port_in_use_is_named(host: str, shared: bool) -> None:
    with socket.socket() as other:
        if shared:
            # As another job's coordinator: two of them would both listen.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError) as raised:
            connection.connect(Processes(0, 2, f"{host}:{port}", connect_timeout_s=0.5))
    said = str(raised.value)
    assert said.startswith(f"process 0 cannot listen on port {port} (Address already in use)")
    assert f"OLMO_JAX_COORDINATOR={host}:{port}" in said


def test_a_port_is_probed_where_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = socket.socket

    def without(family: int = socket.AF_INET, *others: Any, **more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return plain(family, *others, **more)

    monkeypatch.setattr(connection.socket, "socket", without)
    with plain() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port}"):
            connection._refuse_taken_port(f"node:{port}")
    connection._refuse_taken_port(f"node:{port}")


def test_a_port_whose_last_connections_are_closing_is_free() -> None:
    with socket.socket() as server:
        # As gRPC does.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        with socket.create_connection(address), server.accept()[0] as connected:
            # Who closes first keeps the port for a minute.
            connected.close()
    connection._refuse_taken_port(f"127.0.0.1:{address[1]}")


def test_processes_that_do_not_come_are_not_waited_for_for_ever() -> None:
    address = f"127.0.0.1:{free_port()}"
    code = (
        "from olmo_jax.cli import main; from olmo_jax.runtime.connection import connect\n"
        "from olmo_jax.runtime.processes import Processes, exit_process\n"
        "from olmo_jax.errors import UserError\n"
        f"try: connect(Processes(0, 2, {address!r}, connect_timeout_s=0.5))\n"
        "except UserError as error: print(error); exit_process(1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"not all of the 2 processes came to {address} within 0.5 s" in done.stdout


def test_processes_that_were_told_different_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Client:
        def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
            return "2"

    monkeypatch.setattr(connection, "client", Client)
    connection._check_counts(Processes(1, 2, "host:1"))
    with pytest.raises(UserError, match=r"process 1 was told of 4 processes and process 0 of 2"):
        connection._check_counts(Processes(1, 4, "host:1"))


def test_a_job_of_one_machine_stays_off_the_network() -> None:
    assert connection._bind_address("127.0.0.1:99") == "127.0.0.1:99"
    assert connection._bind_address("node7:99") is None
