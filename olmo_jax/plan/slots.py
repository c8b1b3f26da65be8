"""What the slots of a pipeline hold, and how many there are. No jax."""

from olmo_jax.arch.activations import Activation, block_residuals, saved_names
from olmo_jax.arch.layers import is_routed
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.pass_counts import passes


def stage_residuals(layout: Layout) -> list[Activation]:
    """Return what one chunk saves of a microbatch: a leading dim has the repeats of the windows."""
    run, model = passes(layout), layout.model
    repeats = len(run.body) // run.groups.period
    saved, routed = saved_names(layout.config), is_routed(model, run.body[0])
    block = block_residuals(model, layout.device, saved, routed=routed)
    if layout.stages is not None and layout.stages.num_padding:
        block.append(Activation("is no padding layer", "bool", ()))
    if model.router.jitter_eps is not None:
        block.append(Activation("layer number", "int32", ()))
    one = [
        each._replace(shape=(repeats, *each.shape)) if each.every_layer else each for each in block
    ]
    return one * run.groups.period


def peak_live(layout: Layout, rank: int) -> int:
    """Return the most chunk activations that a rank of the pipeline ever holds."""
    # Rank r runs one forward a tick from tick r on. Its first backward is that of its last chunk,
    # in tick (V P - 1) + (P - 1 - r). By then it has run (V + 1) P - 1 - 2 r forwards, and from
    # then on one backward comes with each forward.
    parallel = layout.config.parallel
    chunks = parallel.pipeline_chunks
    all_of_them = chunks * layout.num_microbatches
    if parallel.pipeline_schedule == "gpipe":
        return all_of_them
    return min(all_of_them, (chunks + 1) * layout.sizes["pipeline"] - 1 - 2 * rank)


def num_slots(layout: Layout) -> int:
    """Return how many chunk activations every rank has room for: one program runs on all.

    One more than rank 0 holds if a rank idles in a forward while all that it ever holds is alive:
    in GPipe, and in 1F1B of P microbatches.
    """
    parallel = layout.config.parallel
    chunks = parallel.pipeline_chunks
    most = chunks * layout.num_microbatches + 1
    if parallel.pipeline_schedule == "gpipe":
        return most
    return min(most, (chunks + 1) * layout.sizes["pipeline"] - 1)


def slot_bytes(layout: Layout) -> int:
    """Return the bytes of all slots of one rank."""
    return num_slots(layout) * sum(each.num_bytes for each in stage_residuals(layout))
