"""What the first process decides, and who speaks when it fails."""

import pytest

from olmo_jax.errors import UserError
from olmo_jax.runtime import first_process


class Client:
    """The coordination service, as one process sees it."""

    def __init__(self, **values: str) -> None:
        self.values = {f"olmo_jax/from_first/{name}": text for name, text in values.items()}

    def key_value_set(self, key: str, text: str) -> None:
        self.values[key] = text

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.values[key]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Two processes without a service; what is slept."""
    seconds: list[float] = []
    monkeypatch.setattr(first_process.time, "sleep", seconds.append)
    monkeypatch.setattr(first_process, "is_connected", lambda: True)
    return seconds


def put(monkeypatch: pytest.MonkeyPatch, client: Client, *, first: bool) -> None:
    monkeypatch.setattr(first_process, "client", lambda: client)
    monkeypatch.setattr(first_process, "is_first", lambda: first)


def fail() -> str:
    raise UserError("the folder is in use")


@pytest.mark.usefixtures("slept")
def test_the_others_are_told_what_the_first_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    put(monkeypatch, client, first=True)
    assert first_process.from_first("lock", lambda: "taken", 1.0) == "taken"
    put(monkeypatch, client, first=False)
    assert first_process.from_first("lock", fail, 1.0) == "taken"


def test_the_first_one_speaks_before_the_others_do(
    monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    client = Client()
    put(monkeypatch, client, first=True)
    with pytest.raises(UserError, match="the folder is in use"):
        first_process.from_first("lock", fail, 1.0)
    assert slept == []
    put(monkeypatch, client, first=False)
    with pytest.raises(UserError, match="process 0 failed in 'lock'"):
        first_process.from_first("lock", fail, 1.0)
    # A launcher ends the others as soon as it sees the first one end.
    assert slept == [first_process.UNTIL_IT_ENDS_S]
