"""A profiler trace of some steps of a run, for `train.profile`."""

from pathlib import Path

import jax

from olmo_jax.config.records import ProfileConfig

FOLDER = "profile"


class Trace:
    """Records the steps that a config asks for into `run_dir/profile`; open it around the loop."""

    def __init__(self, run_dir: Path, config: ProfileConfig | None) -> None:
        self.folder = run_dir / FOLDER
        self.steps = range(config.start, config.start + config.steps) if config else range(0)
        self.recorded = False
        self._running = False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begins_with(self, step: int) -> bool:
        """Say whether `step` is the first one recorded; what runs before it must have ended."""
        return bool(self.steps) and step == self.steps[0]

    def ends_with(self, step: int) -> bool:
        """Say whether `step` is the last one recorded; it must have ended, too."""
        return bool(self.steps) and step == self.steps[-1]

    def start(self) -> None:
        jax.profiler.start_trace(str(self.folder))
        self._running = self.recorded = True

    def stop(self) -> None:
        """Write the trace, if one is being recorded."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
