"""The schedule of a config on a mesh. No jax."""

from olmo_jax.mesh.layout import Layout
from olmo_jax.parallel.pipeline.generators import SCHEDULES, forward_only
from olmo_jax.parallel.pipeline.schedule import Schedule


def schedule_of(layout: Layout, *, training: bool = True) -> Schedule:
    """Return the order in which a pipeline runs a step's microbatches, or an evaluation's.

    Raises: UserError if they do not fit it.
    """
    parallel = layout.config.parallel
    make = SCHEDULES[parallel.pipeline_schedule] if training else forward_only
    return make(layout.sizes["pipeline"], parallel.pipeline_chunks, layout.num_microbatches)
