"""Pipeline schedules as plain data, without jax; `executor` runs them."""

from olmo_jax.parallel.pipeline.clock import bubble, peak_live, timeline
from olmo_jax.parallel.pipeline.generators import (
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
)
from olmo_jax.parallel.pipeline.schedule import Ops, Schedule, refusal, stages_of, ticks_of
from olmo_jax.parallel.pipeline.v_shape import one_f_one_b_v
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
    "one_f_one_b_v",
    "peak_live",
    "refusal",
    "stages_of",
    "ticks_of",
    "timeline",
    "validate",
]
