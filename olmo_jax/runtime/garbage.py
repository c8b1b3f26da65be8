"""Python's garbage collector, at the same step on every rank."""

import gc

EVERY_STEPS = 200


class Garbage:
    """While open, cycles are collected every `every` steps and at no other time.

    Left alone, each process collects when its own allocations ask for it. A full collection takes
    a tenth of a second and more, and a step waits for its slowest rank: with many ranks nearly
    every step would wait for one of them.
    """

    def __init__(self, every: int = EVERY_STEPS) -> None:
        self.every = every
        self._was_on = False

    def __enter__(self) -> "Garbage":
        self._was_on = gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()

    def after(self, step: int) -> None:
        """Collect if `step` is one of those; all ranks pass the same steps."""
        if step % self.every == 0:
            gc.collect()
