"""A jax that did not start on what was chosen."""

import jax
import pytest

from olmo_jax.errors import UserError
from olmo_jax.runtime import backend


def test_the_devices_are_those_of_jax() -> None:
    assert backend.num_devices() == jax.device_count()


def test_a_jax_that_falls_back_to_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "runs_on_gpu", lambda: True)
    with pytest.raises(UserError, match="jax cannot start CUDA, although there are a GPU and a"):
        backend.num_devices()


def test_a_jax_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("Unable to initialize backend 'cuda': the driver is too old\nmore")

    monkeypatch.setattr(backend.jax, "default_backend", fail)
    with pytest.raises(UserError, match=r"'cuda': the driver is too old; look at the driver"):
        backend.num_devices()
