"""The plan of a config on a mesh and a machine: what it holds, sends and takes. No device."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from olmo_jax.arch.flops import flops_per_token
from olmo_jax.arch.parameters import active_parameters, total_parameters
from olmo_jax.arch.sizes import ITEM_BYTES
from olmo_jax.config.records import Config
from olmo_jax.mesh.axes import expert_model_axes
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.activation_memory import Held, Workspace, held, workspace
from olmo_jax.plan.communication import Traffic, communication
from olmo_jax.plan.hardware import Hardware, link
from olmo_jax.plan.slots import peak_live
from olmo_jax.plan.state_memory import STATE_BYTES, Memory, state_memory
from olmo_jax.plan.step_time import (
    bubble_share,
    model_flops_utilisation,
    step_time,
    term_of,
    transfer_s,
)


class MethodRow(NamedTuple):
    """What one method asks of a rank.

    `collectives` say which kind over which axes and link; bytes are sent by one rank, in each
    microbatch and in a step as a whole.
    """

    method: str
    divides: str
    axes: str
    used: bool
    keeps: str
    keeps_bytes: int
    collectives: tuple[str, ...]
    microbatch_bytes: float
    step_bytes: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All numbers of one config, each computed when it is first asked for.

    Raises: UserError, from its properties, if a parameter cannot be laid out on the mesh.
    """

    layout: Layout
    hardware: Hardware

    @property
    def config(self) -> Config:
        return self.layout.config

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.layout.sizes

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices

    @property
    def total_parameters(self) -> int:
        return total_parameters(self.config.model)

    @property
    def active_parameters(self) -> int:
        return active_parameters(self.config.model)

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.config.model, self.config.train.sequence_length)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.config.train.global_batch * self.config.train.sequence_length

    @property
    def num_microbatches(self) -> int:
        return self.layout.num_microbatches

    @property
    def checkpoint_bytes(self) -> int:
        return STATE_BYTES * self.total_parameters

    @cached_property
    def persistent(self) -> Memory:
        return state_memory(self.layout)

    @cached_property
    def held(self) -> Held:
        return held(self.layout)

    @cached_property
    def workspace(self) -> Workspace:
        return workspace(self.layout)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Return one rank's bytes by category, the same on every rank: one program runs on all.

        The work space of a block with its dispatch buffers and that of the head are never alive
        together: of `block` + `dispatch` and `logits`, the total has the larger.
        """
        state, activations, space = self.persistent, self.held, self.workspace
        parts = {
            "weights": state.weights,
            "gradients": state.gradients,
            "main": state.main,
            "moments": state.moments,
            "other": state.others,
            "gathered": state.gathered,
            "activations": activations.activations,
            "slots": activations.slots,
            "queues": activations.queues,
        }
        total = sum(parts.values()) + space.most
        spaces = space._asdict()
        return {**parts, **spaces, "total": total}

    @property
    def fits(self) -> bool:
        return self.memory_bytes["total"] <= self.hardware.usable_bytes

    @cached_property
    def communication(self) -> tuple[Traffic, ...]:
        return communication(self.layout)

    @cached_property
    def terms(self) -> dict[str, float]:
        """Return the seconds of a step by term."""
        return step_time(self.layout, self.hardware, self.communication, self.persistent)

    @property
    def step_time_s(self) -> float:
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """Return the term that takes most time."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def mfu(self) -> float:
        return model_flops_utilisation(self.layout, self.step_time_s, self.hardware)

    @property
    def bubble(self) -> float:
        return bubble_share(self.layout)

    @property
    def live_chunks(self) -> list[int]:
        """Return the most chunk activations that each pipeline rank ever needs; [] without one."""
        ranks = self.sizes["pipeline"]
        if ranks == 1:
            return []
        return [peak_live(self.layout, rank) for rank in range(ranks)]

    @cached_property
    def methods(self) -> list[MethodRow]:
        """Return a row for each method that divides something: the table of the design."""
        return list(_method_rows(self))


_DIVIDES = {
    "DDP": "examples",
    "distributed optimizer": "FP32 main weights and moments",
    "FSDP / HSDP": "parameters, gradients, optimizer",
    "EP": "routed experts",
    "PP": "layers",
    "CP": "sequence positions",
    "TP": "tensors",
}


def _method_of(plan: Plan, traffic: Traffic) -> str | None:
    """Return the method that a transfer is there for, None for counts and metrics."""
    term = term_of(traffic)
    by_term = {"expert traffic": "EP", "stage traffic": "PP", "sequence traffic": "CP"}
    if term in by_term:
        return by_term[term]
    if term not in ("weight traffic", "reduction"):
        return None
    if plan.config.parallel.method == "fsdp":
        return "FSDP / HSDP"
    return "DDP" if traffic.kind == "reduce" else "distributed optimizer"


def _expert_bytes(plan: Plan) -> int:
    """Return a rank's compute weights of its routed experts."""
    experts = [leaf for leaf in plan.layout.sharded if leaf.is_expert]
    item = ITEM_BYTES[plan.config.model.dtype]
    return item * sum(leaf.elements(leaf.specs.compute) for leaf in experts)


def _keeps(plan: Plan) -> dict[str, tuple[bool, str, str, int]]:
    """Return of each method whether it is used, its axes, and what a rank keeps."""
    sizes, parallel, state = plan.sizes, plan.config.parallel, plan.persistent
    is_fsdp = parallel.method == "fsdp"
    rows = [axis for axis in ("data", "fsdp", "expert", "sequence") if sizes[axis] > 1]
    shards = is_fsdp and any(sizes[axis] > 1 for axis in ("fsdp", "expert", "sequence"))
    replicas = "data" if is_fsdp else " x ".join(rows)
    return {
        "DDP": (
            not is_fsdp and bool(rows),
            replicas,
            "weights and FP32 gradients",
            0 if is_fsdp else state.weights + state.gradients,
        ),
        "distributed optimizer": (
            not is_fsdp and parallel.shard_optimizer and bool(rows),
            replicas,
            "its shard of main weights and moments",
            0 if is_fsdp else state.main + state.moments,
        ),
        "FSDP / HSDP": (
            shards,
            " x ".join(axis for axis in rows if axis != "data"),
            "its shards, and the weights of a unit",
            state.persistent + state.gathered if is_fsdp else 0,
        ),
        "EP": (
            plan.layout.num_expert_ranks > 1,
            " x ".join(expert_model_axes(fold_sequence=parallel.fold_sequence)),
            "its experts' compute weights",
            _expert_bytes(plan),
        ),
        "PP": (
            sizes["pipeline"] > 1,
            "pipeline",
            "its layers; slots for chunks in flight",
            plan.held.slots,
        ),
        "CP": (
            sizes["sequence"] > 1,
            "sequence",
            "activations of a slice of every sequence",
            plan.held.activations,
        ),
        "TP": (False, "", "not built: it would compete with EP for the fast links", 0),
    }


def _method_rows(plan: Plan) -> Iterator[MethodRow]:
    sent: dict[str, list[Traffic]] = {}
    for traffic in plan.communication:
        if method := _method_of(plan, traffic):
            sent.setdefault(method, []).append(traffic)
    for method, (used, axes, keeps, keeps_bytes) in _keeps(plan).items():
        mine = sent.get(method, [])
        total = sum(traffic.sent_bytes for traffic in mine)
        in_loop = sum(traffic.sent_bytes for traffic in mine if traffic.in_loop)
        yield MethodRow(
            method=method,
            divides=_DIVIDES[method],
            axes=axes if used else "",
            used=used,
            keeps=keeps,
            keeps_bytes=keeps_bytes if used else 0,
            collectives=tuple(_collectives(plan, mine)),
            microbatch_bytes=in_loop / plan.num_microbatches,
            step_bytes=total,
            seconds=sum(transfer_s(traffic, plan.hardware, plan.sizes) for traffic in mine),
        )


def _collectives(plan: Plan, traffic: list[Traffic]) -> Iterator[str]:
    """Yield "all_gather over data x expert (network)", the one with most bytes first."""
    sent: Counter[str] = Counter()
    for each in traffic:
        where = link(plan.hardware, each.axes, plan.sizes)
        sent[f"{each.kind} over {' x '.join(each.axes)} ({where})"] += int(each.sent_bytes)
    yield from (text for text, _ in sent.most_common())
