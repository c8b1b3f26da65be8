"""A pipeline that runs gives one device's results, in its schedule's time and memory."""

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.inspect import hlo
from olmo_jax.inspect import jaxpr as jaxprs
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.devices import build_mesh
from olmo_jax.parallel.pipeline import (
    Schedule,
    bubble,
    forward_only,
    gpipe,
    interleaved,
    ticks,
    validate,
)
from olmo_jax.parallel.pipeline import setup as machines
from olmo_jax.parallel.pipeline.executor import Parts, run
from tests.parallel.pipeline import toy

ROWS, LENGTH = 4, 5
GENERATORS = {"1f1b": interleaved, "gpipe": gpipe, "forward": forward_only}


@dataclass(frozen=True)
class Case:
    """A schedule, layers and mesh; what is traced, compiled and run of it, each once."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    layers: int
    axes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def schedule(self) -> Schedule:
        return validate(GENERATORS[self.name](self.ranks, self.chunks, self.microbatches))

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(AXES, 1) | {"pipeline": self.ranks} | dict(self.axes)

    @cached_property
    def batch(self) -> tuple[toy.Data, np.ndarray]:
        return toy.microbatches(self.microbatches, ROWS, LENGTH)

    @cached_property
    def traced(self) -> Any:
        step, weights = toy.program(self.schedule, build_mesh(self.sizes), self.layers)
        return step.trace(weights, *self.batch)

    @cached_property
    def jaxpr(self) -> Any:
        return jaxprs.live(self.traced.jaxpr)

    @cached_property
    def compiled(self) -> Any:
        return self.traced.lower().compile()

    @cached_property
    def results(self) -> Any:
        _, weights = toy.program(self.schedule, build_mesh(self.sizes), self.layers)
        return self.compiled(weights, *self.batch)


case = cache(Case)


def relative(value, wanted):
    return float(np.abs(np.asarray(value) - wanted).max() / np.abs(wanted).max())


def check(case):
    """Hold a case's results to one-device autodiff. 1e-6: FP32 sums in another order."""
    (loss, aux, counts), (loss_tokens, tokens), gradients = case.results
    wanted, wanted_gradients = toy.reference(case.layers, case.microbatches, ROWS, LENGTH)
    assert relative(loss, wanted[0]) < 1e-6
    assert relative(aux, wanted[1]) < 1e-6
    held, empty = toy.layer_order(counts, case.layers)
    np.testing.assert_array_equal(held, wanted[2])
    assert not empty.any()
    labels = case.batch[1]
    assert (int(loss_tokens), int(tokens)) == ((labels != toy.IGNORED).sum(), labels.size)
    if case.schedule.forward_only:
        return
    body = {name: toy.layer_order(leaf, case.layers) for name, leaf in gradients.body.items()}
    assert not any(empty.any() for _, empty in body.values())
    found = gradients._replace(body={name: held for name, (held, _) in body.items()})
    errors = jax.tree.map(relative, found, wanted_gradients)
    # Not `max(...) < 1e-6`: NaN would pass.
    assert all(error < 1e-6 for error in jax.tree.leaves(errors)), errors


MATRIX = [
    *(("1f1b", 2, chunks, groups * 2) for chunks in (1, 3) for groups in (1, 2, 3, 4)),
    *(("1f1b", 2, 2, groups * 2) for groups in (1, 2, 3)),
    *(("1f1b", 4, chunks, groups * 4) for chunks in (1, 2, 3) for groups in (1, 2, 4)),
    *(("gpipe", ranks, chunks, 2 * ranks) for ranks in (2, 4) for chunks in (1, 2, 3)),
]


@pytest.mark.parametrize(
    "case",
    [
        case("1f1b", 2, 2, 8, 7),
        case("1f1b", 2, 1, 4, 3, (("data", 2), ("expert", 2))),
        case("gpipe", 4, 1, 4, 4),
        case("forward", 4, 2, 8, 7, (("expert", 2),)),
        *(
            pytest.param(case(*counts, counts[1] * counts[2] * 2 - 2), marks=pytest.mark.matrix)
            for counts in MATRIX
        ),
        *(
            pytest.param(case("1f1b", *counts, axes), marks=pytest.mark.matrix)
            for counts in ((4, 2, 8, 8), (2, 3, 4, 11), (4, 1, 4, 7))
            for axes in ((("expert", 2),), (("data", 2),), (("fsdp", 2),))
        ),
        pytest.param(case("forward", 2, 3, 4, 5, (("data", 2),)), marks=pytest.mark.matrix),
    ],
    ids=lambda case: f"{case.name}-{case.ranks}-{case.chunks}-{case.microbatches}-{case.axes}",
)
def test_loss_gradients_and_counts_equal_one_device(case):
    check(case)


def poisoned(function, poison):
    """Return a forward or backward in which idle ranks get poison from their neighbours."""

    def bad(value, op):
        return jnp.where(op.valid, value, jnp.full_like(value, poison))

    def forward(setup, carry, op):
        sick = carry._replace(arrived=bad(carry.arrived, op), inbox=bad(carry.inbox, op))
        after, y = function(setup, sick, op)
        return after._replace(inbox=carry.inbox), y

    def backward(setup, carry, op, back, d_rows):
        return function(setup, carry, op, bad(back, op), d_rows)

    return forward if function.__name__ == "_forward" else backward


@pytest.mark.parametrize(
    "poison", [float("nan"), pytest.param(1e4, marks=pytest.mark.matrix)], ids=str
)
@pytest.mark.parametrize(
    "counts",
    [
        ("1f1b", 4, 1, 4, 4),
        *(
            pytest.param(counts, marks=pytest.mark.matrix)
            for counts in (("1f1b", 4, 2, 12, 7), ("1f1b", 2, 3, 4, 6), ("gpipe", 2, 2, 4, 4))
        ),
    ],
    ids=str,
)
def test_what_idle_ranks_hold_and_send_changes_nothing(counts, poison, monkeypatch):
    def blank(shapes, *leading):
        return jax.tree.map(
            lambda leaf: leaf + jnp.asarray(poison, leaf.dtype), zeros(shapes, *leading)
        )

    zeros = machines.zeros
    monkeypatch.setattr(machines, "blank", blank)
    monkeypatch.setattr(ticks, "_forward", poisoned(ticks._forward, poison))
    monkeypatch.setattr(ticks, "_backward", poisoned(ticks._backward, poison))
    check(Case(*counts))


def test_slots_are_the_schedules_and_hold_tokens_only():
    held = case("1f1b", 4, 2, 8, 8)
    slots = {
        value.shape[1:]
        for value in jaxprs.scan_values(held.jaxpr)
        if value.source == "carry" and value.shape[:1] == (held.schedule.num_slots,)
    }
    tokens = ROWS * LENGTH
    of_a_layer = {
        (ROWS, LENGTH, toy.D),
        (ROWS, LENGTH, toy.HIDDEN),
        (tokens, toy.EXPERTS),
        (toy.EXPERTS, tokens, toy.D),
    }
    assert held.schedule.num_slots == 11
    assert slots == {(1, *shape) for shape in of_a_layer}


@pytest.mark.parametrize("counts", [("1f1b", 4, 2), ("gpipe", 2, 1)], ids=str)
@pytest.mark.parametrize("microbatches", [8, 32])
def test_products_are_those_of_the_model_and_of_the_bubble(counts, microbatches):
    """They are (body / (1 - bubble) + ends) / ranks: nothing is computed twice."""
    held = case(*counts, microbatches, 8)

    def flops(layers):
        differentiated = jax.grad(lambda *arguments: toy.objective(*arguments)[0])
        jaxpr = jax.make_jaxpr(differentiated)(toy.weights(layers), *held.batch)
        return jaxprs.matmul_flops(jaxprs.live(jaxpr))

    ends = flops(0)
    body = (flops(held.layers) - ends) / (1 - bubble(held.schedule))
    assert jaxprs.matmul_flops(held.jaxpr) == (body + ends) / held.ranks


def test_communication_is_that_of_the_formula():
    held = case("1f1b", 4, 2, 8, 8)
    x = 4 * ROWS * LENGTH * toy.D
    ticks = held.microbatches * held.chunks + held.ranks - 1
    found = Counter()
    for c in jaxprs.collectives(held.jaxpr, held.sizes):
        if c.kind != "reduce":
            found[c.scope.rsplit("/", 1)[-1], c.kind, c.axes, c.operand_bytes] += c.count
    groups = held.microbatches // held.ranks
    assert found == {
        ("send_activation", "permute", ("pipeline",), x): ticks,
        ("send_gradient", "permute", ("pipeline",), x): ticks,
        ("share_rows", "reduce_scatter", ("pipeline",), x): held.microbatches,
        ("gather_row_gradients", "all_gather", ("pipeline",), x // held.ranks): held.microbatches,
        ("gather_group", "all_gather", ("pipeline",), x): groups,
        ("scatter_group", "reduce_scatter", ("pipeline",), x * held.ranks): groups,
    }


def _steady_ticks(jaxpr):
    """Return the bodies of the loops over ticks that send both ways."""
    sends = [site for site in jaxprs.equations(jaxpr) if site.name == "ppermute"]
    bodies = [s.equation.params["jaxpr"].jaxpr for s in jaxprs.equations(jaxpr) if s.name == "scan"]
    assert sends
    own = [[e for e in body.eqns if e.primitive.name == "ppermute"] for body in bodies]
    return [(body, found) for body, found in zip(bodies, own, strict=True) if len(found) == 2]


def test_a_gradient_is_sent_as_it_was_carried_and_nothing_waits_for_an_activation():
    """So either transfer can run behind the work of its tick."""
    steady = _steady_ticks(case("1f1b", 4, 2, 8, 8).jaxpr)
    assert steady
    for body, sends in steady:
        scopes = {str(send.source_info.name_stack).rsplit("/", 1)[-1]: send for send in sends}
        assert scopes["send_gradient"].invars[0] in body.invars
        (activation,) = scopes["send_activation"].outvars
        (user,) = [equation for equation in body.eqns if activation in equation.invars]
        assert user.primitive.name == "optimization_barrier"
        assert user.invars == [activation]
        assert user.outvars[0] in body.outvars
        assert not any(user.outvars[0] in equation.invars for equation in body.eqns)


def test_the_program_and_its_memory_do_not_grow_with_the_microbatches():
    few, many = case("1f1b", 2, 2, 8, 7), case("1f1b", 2, 2, 32, 7)
    modules = [hlo.parse(one.compiled.as_text()) for one in (few, many)]
    for one, module in zip((few, many), modules, strict=True):
        assert not jaxprs.conditionals(one.jaxpr)
        assert not hlo.conditionals(module)
        assert not jaxprs.unbounded_loops(one.jaxpr)
        assert not hlo.unbounded_loops(module)
        assert not jaxprs.scatter_adds(one.jaxpr)
    size, larger = (sum(map(len, module.computations.values())) for module in modules)
    assert larger == pytest.approx(size, rel=0.01)
    memory, more = (one.compiled.memory_analysis().temp_size_in_bytes for one in (few, many))
    # The allocator aligns buffers as they come.
    assert more == pytest.approx(memory, rel=0.01)


def call(schedule, **changed):
    arguments = {
        "accumulators": Parts({}, {}, {}),
        "data": {"tokens": np.zeros((4, 2), np.int32)},
        "labels": jnp.zeros((4, 2), jnp.int32),
        "ignored": toy.IGNORED,
    }
    return run(schedule, Parts(None, None, None), **(arguments | changed))


@pytest.mark.parametrize(
    ("schedule", "changed", "message"),
    [
        (
            interleaved(2, 1, 4),
            {"accumulators": None},
            "no accumulators given, but the interleaved schedule needs",
        ),
        (
            forward_only(2, 1, 4),
            {},
            "accumulators given, but the forward schedule has no use for them",
        ),
        (interleaved(2, 1, 6), {}, r"shape \[4, 2\], but the schedule has 6 microbatches"),
    ],
)
def test_arguments_that_do_not_fit_the_schedule_are_refused(schedule, changed, message):
    with pytest.raises(ValueError, match=message):
        call(schedule, **changed)


def test_a_stage_that_changes_what_goes_on_is_refused():
    with pytest.raises(ValueError, match=r"makes float32\[5, 3\] of float32\[5, 6\]"):
        machines._check_stage(jnp.zeros((5, 6)), jax.ShapeDtypeStruct((5, 3), jnp.float32))
