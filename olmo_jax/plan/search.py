"""Every mesh that a number of devices allows, ranked by the time that the plan predicts."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from olmo_jax.arch.layers import layer_groups, least_padding
from olmo_jax.config import Config
from olmo_jax.config.messages import divisors, show
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.alternatives import changed
from olmo_jax.plan.hardware import Hardware
from olmo_jax.plan.plan import Plan
from olmo_jax.rules.validation import violations

SHOWN = 10

MOST_CHUNKS = 4
"""More chunks make the bubble smaller by ever less, and each is a message more."""


class Candidate(NamedTuple):
    """A mesh, a method, the chunks of a pipeline, and what backward rematerializes."""

    sizes: dict[str, int]
    method: str
    chunks: int
    recompute: Any

    @property
    def text(self) -> str:
        """Return it as the command line takes it."""
        mesh = " ".join(f"mesh.{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        more = f" parallel.method={self.method}"
        if self.sizes["pipeline"] > 1:
            more += f" parallel.pipeline_chunks={self.chunks}"
        return f"{mesh or 'mesh.data=1'}{more} train.recompute={show(self.recompute)}"


class Ranked(NamedTuple):
    candidate: Candidate
    plan: Plan


@dataclass(frozen=True)
class Found:
    """What fits, the fastest first; what would be legal and does not fit; the rest by reason."""

    fitting: list[Ranked]
    too_large: list[Ranked]
    rejected: Counter[str]

    @property
    def num_candidates(self) -> int:
        return len(self.fitting) + len(self.too_large) + self.rejected.total()


def meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes whose product is the number of devices, each once."""
    # All axes but the last choose a divisor; the last takes what is left, if it divides.
    for sizes in itertools.product(divisors(num_devices), repeat=len(AXES) - 1):
        rest, remainder = divmod(num_devices, math.prod(sizes))
        if rest and not remainder:
            yield dict(zip(AXES, (*sizes, rest), strict=True))


def _chunks(config: Config, ranks: int) -> tuple[int, ...]:
    if ranks == 1:
        return (1,)
    groups = layer_groups(config.model)
    found = least_padding(len(groups.body), ranks, period=groups.period)
    return tuple(chunks for chunks in found if chunks <= MOST_CHUNKS)


def candidates(config: Config, num_devices: int) -> Iterator[Candidate]:
    """Yield all meshes, those that have an `fsdp` with that method.

    With ddp, `fsdp` is a second name of `data`, and such a mesh would come twice.
    """
    for sizes in meshes(num_devices):
        for chunks in _chunks(config, sizes["pipeline"]):
            method = "ddp" if sizes["fsdp"] == 1 else "fsdp"
            yield Candidate(sizes, method, chunks, config.train.recompute)


def reason_of(message: str) -> str:
    """Return the key that a message begins with: what a rejection is counted under."""
    found = re.match(r"(?:mesh|parallel|train|model)\.\w+", message)
    return found[0] if found else message.partition(";")[0][:60]


def _in_config(config: Config, candidate: Candidate) -> Config:
    parallel = {"method": candidate.method, "pipeline_chunks": candidate.chunks}
    train = {"recompute": candidate.recompute}
    return changed(config, {"mesh": candidate.sizes, "parallel": parallel, "train": train})


def _policies(config: Config) -> list[Any]:
    """Return the config's policy, and those that save less: a mesh takes the first that fits."""
    given = config.train.recompute
    return [given, *(policy for policy in ("experts", "block") if given not in (policy, "block"))]


def _with_least_recompute(
    config: Config, candidate: Candidate, hardware: Hardware
) -> tuple[Ranked | None, str]:
    """Return the plan of the first policy that fits, else of the last one; or why there is none.

    The rules do not depend on the policy.
    """
    ranked = None
    for policy in _policies(config):
        candidate = candidate._replace(recompute=policy)
        other = _in_config(config, candidate)
        if messages := violations(other):
            return ranked, messages[0]
        ranked = Ranked(candidate, Plan(Layout(other, candidate.sizes), hardware))
        if ranked.plan.fits:
            break
    return ranked, ""


def search(config: Config, num_devices: int, hardware: Hardware) -> Found:
    """Rank every legal mesh; batch and microbatch stay the config's."""
    fitting, too_large, rejected = [], [], Counter()
    for candidate in candidates(config, num_devices):
        try:
            ranked, message = _with_least_recompute(config, candidate, hardware)
        except UserError as error:
            ranked, message = None, str(error)
        if ranked is None:
            rejected[reason_of(message)] += 1
        else:
            (fitting if ranked.plan.fits else too_large).append(ranked)
    return Found(
        sorted(fitting, key=lambda ranked: ranked.plan.step_time_s),
        sorted(too_large, key=lambda ranked: ranked.plan.memory_bytes["total"]),
        rejected,
    )
