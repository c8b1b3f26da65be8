"""What the step of eight devices communicates, where, how often, and in which dtype."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from olmo_jax.inspect import MICROBATCHES, hlo, measure
from olmo_jax.inspect import jaxpr as jaxprs
from olmo_jax.mesh.specs import axes_of_entry
from tests import cases

SIZES = {"pipeline": 1, "data": 2, "fsdp": 1, "expert": 4, "sequence": 1}
HSDP = {"method": "fsdp"}
MOST = 4


@pytest.fixture(scope="module")
def traced(program_of):
    """Return a function from the number of microbatches to the traced step."""

    def trace(num_microbatches):
        program = program_of(cases.bf16_on_eight(num_microbatches))
        assert program.layout.num_microbatches == num_microbatches
        return program.jitted.trace(*program.abstract_arguments())

    return cache(trace)


@pytest.fixture(scope="module")
def program(program_of):
    return program_of(cases.bf16_on_eight(MOST))


@pytest.fixture(scope="module")
def contract(traced):
    return measure(traced(MOST), SIZES)


@pytest.fixture(scope="module")
def step_jaxpr(traced):
    return jaxprs.live(traced(MOST).jaxpr)


def once(traced):
    found = jaxprs.collectives(jaxprs.live(traced.jaxpr), SIZES)
    return [c for c in found if not jaxprs.inside(c.loops, scope=MICROBATCHES)]


@pytest.mark.parametrize("other", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_what_is_sent_once_a_step_does_not_depend_on_microbatches(other, traced):
    assert once(traced(other)) == once(traced(MOST))


def test_weights_and_gradients_cross_the_mesh_only_outside_the_loop(contract):
    inside = [c for c in contract.traced if jaxprs.inside(c.loops, scope=MICROBATCHES)]
    assert {c.axes for c in inside} == {("expert",)}
    scopes = ("exchange_counts", "dispatch", "combine")
    assert all(any(scope in c.scope for scope in scopes) for c in inside)
    # XLA:CPU writes a gather of 32-bit integers as a sum.
    kinds = {"all_gather", "reduce_scatter", "reduce"}
    assert contract.compiled_kinds(in_loop=True).keys() <= kinds
    outside = contract.compiled_kinds(in_loop=False)
    assert outside["reduce_scatter"] == outside["all_gather"] == len(scattered_leaves(contract))


def scattered_leaves(contract):
    return [c for c in contract.traced if c.scope == "gather_weights" for _ in range(c.count)]


def test_no_branch_no_open_loop_no_callback_no_repeated_scatter(contract, step_jaxpr):
    assert (contract.conditionals, contract.callbacks, contract.scatter_adds) == (0, 0, 0)
    assert jaxprs.unbounded_loops(step_jaxpr) == []
    assert contract.loops
    assert all(loop.length for loop in contract.loops)


def test_the_whole_state_is_donated(program, contract):
    state = program.abstract_arguments()[0]
    leaves = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    ]
    assert list(contract.donated.values()) == leaves
    assert contract.memory["alias"] == sum(leaves)


def local_shape(shape, spec, sizes):
    cut = [math.prod(sizes[axis] for axis in axes_of_entry(entry)) for entry in spec]
    cut += [1] * (len(shape) - len(spec))
    return tuple(size // n for size, n in zip(shape, cut, strict=True))


def shapes_of(program, name):
    """Return the shapes of a leaf's gradient on a device: stacked, of a layer, of an expert."""
    leaf, specs = program.layout.parameters[name], program.layout.specs[name]
    whole = local_shape(leaf.shape, specs.compute, program.mesh.shape)
    layer = whole[1:] if name.startswith("body") else whole
    return [whole, layer, *([layer[1:]] if "experts" in name else [])]


METHODS = [
    None,
    HSDP,
    pytest.param(HSDP | {"reshard": "after_backward"}, marks=pytest.mark.matrix),
    pytest.param(HSDP | {"reshard": "step"}, marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module", params=METHODS, ids=["ddp", "full", "after_backward", "step"])
def method(request, program_of, program, step_jaxpr):
    """Return the program and the jaxpr of the step of a method."""
    if request.param is None:
        return program, step_jaxpr
    other = program_of(cases.bf16_on_eight(MOST, request.param))
    return other, jaxprs.live(other.jitted.trace(*other.abstract_arguments()).jaxpr)


def test_every_product_that_yields_a_weight_gradient_is_fp32(method):
    program, jaxpr = method
    products = jaxprs.matmuls(jaxpr)
    for name in program.layout.parameters:
        if "gain" not in name:
            found = jaxprs.with_shapes(products, shapes_of(program, name))
            assert found, name
            assert {product.dtype for product in found} == {"float32"}, name
    # The activations' own products are not: it is bf16 that is computed in.
    assert "bfloat16" in {product.operand_dtypes[0] for product in products}


def test_every_sum_that_holds_a_weight_gradient_is_fp32(method):
    program, jaxpr = method
    reductions = jaxprs.float_reductions(jaxpr, dict(program.mesh.shape))
    assert {collective.dtype for collective in reductions} == {"float32"}
    shapes = [shape for name in program.layout.parameters for shape in shapes_of(program, name)]
    sums = jaxprs.outputs(jaxpr, "add", "add_any", "reduce_sum", "scatter-add")
    carries = [value for value in jaxprs.scan_values(jaxpr) if value.source == "carry"]
    for values in (sums, carries):
        floats = [value for value in values if jnp.issubdtype(value.dtype, jnp.floating)]
        found = jaxprs.with_shapes(floats, shapes)
        assert found
        assert {value.dtype for value in found} == {"float32"}


def test_each_gradient_is_added_in_place_to_its_one_fp32_accumulator(method):
    program, jaxpr = method
    leaves, specs = program.layout.parameters, program.layout.specs
    kept = {
        name: local_shape(leaf.shape, specs[name].resident, program.mesh.shape)
        for name, leaf in leaves.items()
    }
    sizes = sorted(math.prod(shape) for shape in kept.values())
    found = jaxprs.accumulators(jaxpr)
    assert sorted(math.prod(value.shape) for value in found) == sizes
    added = jaxprs.additions(jaxpr)
    assert len(added) == len(kept)
    assert {value.dtype for value in (*found, *added)} == {"float32"}
    # A layer's gradient at a time, and no copy of weights: no scan over layers yields all of them.
    stacks = {shape for name, shape in kept.items() if name.startswith("body") and shape[-1] > 8}
    stacks |= {(shape[0], 1, *shape[1:]) for shape in stacks}
    results = [v for v in jaxprs.scan_values(jaxpr) if MICROBATCHES in v.scope]
    assert results
    assert not [value for value in results if value.shape in stacks]


ARITHMETIC = ("add", "sub", "mul", "div", "sqrt", "square", "integer_pow", "pow", "select_n")


def test_the_optimizer_computes_in_fp32(method):
    values = [
        value
        for value in jaxprs.outputs(method[1], *ARITHMETIC, "reduce_sum")
        if MICROBATCHES not in value.scope and jnp.issubdtype(value.dtype, jnp.floating)
    ]
    assert len(values) > 100
    assert {value.dtype for value in values} == {"float32"}


def test_the_router_computes_in_fp32(step_jaxpr):
    shape = (1, cases.LENGTH, cases.MODEL.num_experts)
    logits = [p for p in jaxprs.matmuls(step_jaxpr) if p.shape == shape]
    assert logits
    assert {product.operand_dtypes for product in logits} == {("float32", "float32")}
    values = jaxprs.outputs(step_jaxpr, *ARITHMETIC, "exp", "log", "top_k", "dot_general")
    scores = [value for value in values if value.shape[-2:] == shape[-2:]]
    assert "exp" in {value.source for value in scores}
    floats = {v.dtype for v in scores if jnp.issubdtype(v.dtype, jnp.floating)}
    assert floats == {"float32"}


def test_evaluation_gathers_a_unit_at_its_use(program_of):
    """Hoisted out of the loop over microbatches, all units would be there at once."""
    evaluation = program_of(cases.bf16_on_eight(2, HSDP))._evaluation
    found = hlo.collectives(hlo.parse(evaluation.as_text()))
    gathers = [c for c in found if c.kind == "all_gather"]
    assert len(gathers) > 16
    assert all(c.loops for c in gathers)
