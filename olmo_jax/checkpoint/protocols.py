"""What a checkpoint asks of a state and of the program that lays it out; `train` has both."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from olmo_jax.config.records import Config

Leaves = dict[str, Any]
"""Arrays by name, or their shapes."""


@runtime_checkable
class State(Protocol):
    """What a run carries from step to step: a record whose compute weights are not stored."""

    @property
    def main(self) -> Leaves:
        """Return the FP32 weights by the parameters' names."""
        ...

    @property
    def opt_state(self) -> Any:
        """Return the optimizer's state."""
        ...

    @property
    def expert_bias(self) -> Leaves:
        """Return the routers' biases."""
        ...

    @property
    def history(self) -> Leaves:
        """Return the skip rule's past."""
        ...

    @property
    def step(self) -> Any:
        """Return how many steps were taken or skipped."""
        ...

    def _replace(self, **changed: Any) -> Any: ...


S = TypeVar("S", bound=State)


@runtime_checkable
class Program(Protocol[S]):
    """What lays a state out on a mesh."""

    @property
    def config(self) -> Config:
        """Return the config of the run."""
        ...

    def abstract_stored(self) -> S:
        """Return shapes and shardings of a state as a checkpoint has it."""
        ...

    def restored(self, state: S) -> S:
        """Return the state of one as a checkpoint has it, compute weights rebuilt."""
        ...
