"""Pipeline schedules as plain data, without jax; `executor` runs them."""

from olmo_jax.parallel.pipeline.generators import (
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
)
from olmo_jax.parallel.pipeline.schedule import Ops, Schedule, stages_of, ticks_of
from olmo_jax.parallel.pipeline.timeline import bubble, peak_live, timeline
from olmo_jax.parallel.pipeline.validation import validate

__all__ = [
    "SCHEDULES",
    "Ops",
    "Schedule",
    "bubble",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "peak_live",
    "stages_of",
    "ticks_of",
    "timeline",
    "validate",
]
