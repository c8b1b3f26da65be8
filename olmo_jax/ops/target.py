"""The device that a program is traced for: this process's, or one that only a compiler knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """What an operation chooses its backend by; `compute_capability` is CUDA's, "0" elsewhere."""

    platform: str
    compute_capability: str = "0"

    @property
    def is_gpu(self) -> bool:
        return self.platform in ("gpu", "cuda")


_given: ContextVar[Target | None] = ContextVar("target", default=None)


def here() -> Target:
    """Return the target that `tracing_for` gave, else this process's first device."""
    given = _given.get()
    if given is not None:
        return given
    device = jax.devices()[0]
    return Target(device.platform, getattr(device, "compute_capability", "0"))


@contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Let operations inside choose the backends of `target`, whatever this process runs on."""
    token = _given.set(target)
    try:
        yield
    finally:
        _given.reset(token)
