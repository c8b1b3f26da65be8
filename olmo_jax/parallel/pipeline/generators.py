"""The schedules by name: GPipe, 1F1B, interleaved 1F1B, and forwards alone.

A microbatch moves on by one stage a tick, so two formulas give all: microbatches enter in groups
of P, and the next group enters P*V ticks later.
"""

import numpy as np
from jaxtyping import Int

from olmo_jax.errors import UserError
from olmo_jax.parallel.pipeline.schedule import Schedule, from_ticks, require_counts


def _require_groups(ranks: int, microbatches: int) -> None:
    """Check that microbatches come in groups of `ranks`.

    Raises: UserError with the nearest numbers that do.
    """
    below = microbatches - microbatches % ranks
    if below != microbatches:
        choices = " or ".join(str(n) for n in (below, below + ranks) if n)
        raise UserError(
            f"microbatches={microbatches} is no multiple of ranks={ranks}, and they enter the "
            f"pipeline in groups of {ranks}; use microbatches={choices}"
        )


def _entries(ranks: int, chunks: int, microbatches: int) -> Int[np.ndarray, "stages microbatches"]:
    """Return after how many ticks each microbatch reaches the k-th stage that it visits."""
    # P=2, V=2, M=4, forwards; F21 is stage 2 and microbatch 1:
    #
    #     tick      0    1    2    3    4    5    6    7    8
    #     rank 0   F00  F01  F20  F21  F02  F03  F22  F23
    #     rank 1        F10  F11  F30  F31  F12  F13  F32  F33
    #
    # tick(s, m) = group * P * V + index + s. With s = chunk * P + rank,
    #
    #     tick - rank = group * P * V + chunk * P + index,    index < P, chunk < V.
    #
    # These are digits of a mixed radix: no two ops of a rank share a tick, and none is left idle
    # between the first and the last. Stage s + 1 follows in the next tick on the next rank.
    group, index = np.divmod(np.arange(microbatches), ranks)
    return group * ranks * chunks + index + np.arange(ranks * chunks)[:, None]


def interleaved(
    ranks: int, chunks: int, microbatches: int, *, name: str = "interleaved"
) -> Schedule:
    """Return interleaved 1F1B: a backward begins in the tick of the last stage's forward.

    Source: olmo_core 3.0.0, train/train_module/transformer/pipeline/pipeline_schedule.py
        (CustomScheduleInterleaved1F1B).
    Differs: any number of chunks (there 2); microbatches must be a multiple of ranks.
    """
    require_counts(ranks, chunks, microbatches)
    _require_groups(ranks, microbatches)
    entries = _entries(ranks, chunks, microbatches)
    # The way back visits stages from the last: stage s is its (P V - 1 - s)-th. It begins P V - 1
    # ticks after the way there, which is when the last stage runs microbatch 0 forward.
    backward = ranks * chunks - 1 + entries[::-1]
    return from_ticks(name, ranks, entries, backward)


def one_f_one_b(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return 1F1B, which is the interleaved schedule of one chunk a rank.

    Raises: UserError for more than one chunk.
    Differs: from PyTorch's 1F1B, where rank r holds P-r microbatches. In these ticks it
        holds 2(P-r)-1, in the same time.
    """
    if chunks > 1:
        raise UserError(
            f"chunks={chunks}, but 1f1b runs 1 chunk a rank; use chunks=1, or interleaved"
        )
    return interleaved(ranks, chunks, microbatches, name="1f1b")


def gpipe(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards, both in order of microbatches.

    The gradients of all losses are held from the one to the other; in 1F1B none is.
    """
    require_counts(ranks, chunks, microbatches)
    _require_groups(ranks, microbatches)
    entries = _entries(ranks, chunks, microbatches)
    backward = entries.max() + 1 + entries[::-1]
    return from_ticks("gpipe", ranks, entries, backward)


def forward_only(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return the forwards alone, for evaluation: microbatches follow each other as in training."""
    require_counts(ranks, chunks, microbatches)
    _require_groups(ranks, microbatches)
    entries = _entries(ranks, chunks, microbatches)
    return from_ticks("forward", ranks, entries, None)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}
"""What a training step can run: functions of (ranks, chunks, microbatches)."""
