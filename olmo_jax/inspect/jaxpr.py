"""Read what a traced step does: collectives, matrix products, loops and dtypes, on its jaxpr.

A jaxpr is what was asked for, before XLA merges, hoists or widens anything: counts and bytes that
must equal a formula come from here, positions in the compiled program from `hlo`.
An operation inside scans counts once per iteration. Pass a jaxpr through `live` first where dead
code (residuals that nobody reads) must not count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from olmo_jax.mesh import collectives as collectives_bytes

AnyJaxpr = Jaxpr | ClosedJaxpr

KINDS = {
    "psum": "reduce",
    "psum_invariant": "reduce",
    "unreduced_psum": "reduce",
    "pmax": "max",
    "unreduced_pmax": "max",
    "pmin": "min",
    "unreduced_pmin": "min",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
}
"""Primitive (as 0.10 to 0.12 name them, with or without `_start`) to the kind of collective."""

_SILENT = {"axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast"}
_KERNELS = {"pallas_call", "core_map", "mpmd_map"}
_SCATTERS = {"scatter-add", "scatter-sub", "scatter-mul"}


@dataclass(frozen=True)
class Loop:
    """A loop around an operation: the scopes it was traced under, and its trip count if known."""

    scope: str
    length: int | None


@dataclass(frozen=True)
class Site:
    """One equation and where it stands: scopes from the outside in, and the loops around it."""

    equation: JaxprEqn
    scope: str
    loops: tuple[Loop, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def times(self) -> int:
        """How often it runs; a loop without a known trip count enters as one iteration."""
        return math.prod(1 if loop.length is None else loop.length for loop in self.loops)


@dataclass(frozen=True)
class Collective:
    """One communication at one place; `operand_bytes` is what one rank puts in each time."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    operand_bytes: int
    count: int
    scope: str
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Matmul:
    """One matrix product: operand and output shapes, output dtype, `flops` of one execution."""

    operands: tuple[tuple[int, ...], tuple[int, ...]]
    operand_dtypes: tuple[str, str]
    shape: tuple[int, ...]
    dtype: str
    flops: int
    times: int
    scope: str
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Value:
    """An array that is computed; `source` is the primitive, or a scan's `carry` or `output`."""

    source: str
    shape: tuple[int, ...]
    dtype: str
    scope: str
    loops: tuple[Loop, ...]


Record = TypeVar("Record", Collective, Matmul, Value)


def live(jaxpr: AnyJaxpr) -> Jaxpr:
    """Return `jaxpr` without the equations whose results nobody reads, in all nested bodies too."""
    # instantiate: the signature stays, so arguments keep their numbers.
    body = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)[0]


def equations(jaxpr: AnyJaxpr, scope: str = "", loops: tuple[Loop, ...] = ()) -> Iterator[Site]:
    """Yield every equation, nested ones after the one that holds them.

    Descends into jit, shard_map, scan, while, cond (all branches), custom derivatives and remat;
    not into kernels and the scalar bodies of reductions and scatters.
    """
    for equation in jaxpr.eqns:
        here = "/".join(part for part in (scope, str(equation.source_info.name_stack)) if part)
        yield Site(equation, here, loops)
        # The body of a scan stands in the jaxpr once and runs `length` times: sites carry the loops
        # around them, and `Site.times` multiplies their lengths.
        inner = loops + _own_loop(equation, here)
        for body in _bodies(equation):
            yield from equations(body, here, inner)


def _own_loop(equation: JaxprEqn, scope: str) -> tuple[Loop, ...]:
    if equation.primitive.name == "scan":
        return (Loop(scope, equation.params["length"]),)
    return (Loop(scope, None),) if equation.primitive.name == "while" else ()


def _bodies(equation: JaxprEqn) -> Iterator[AnyJaxpr]:
    name = equation.primitive.name
    if name in _KERNELS or name.startswith(("scatter", "reduce", "select_and")):
        return
    # By type, not by the names of parameters, which differ by primitive and version.
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (Jaxpr, ClosedJaxpr)):
                yield part


def inside(loops: Iterable[Loop], *, scope: str | None = None, length: int | None = None) -> bool:
    """Say whether one of `loops` has `scope` in its scopes and `length` as its trip count."""
    return any(
        (scope is None or scope in loop.scope) and (length is None or loop.length == length)
        for loop in loops
    )


def collectives(jaxpr: AnyJaxpr, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Return all communication in order, equal ones at one place merged, counts per execution.

    Axes of size 1 are dropped, and with them the collectives that have no other. Inside a loop
    without a known trip count (see `unbounded_loops`) a count covers one iteration.

    Raises: ValueError on a primitive over mesh axes that this module does not know.
    """
    counts: Counter[Collective] = Counter()
    for site in equations(jaxpr):
        for collective in _collectives_of(site, axis_sizes):
            counts[collective] += site.times
    return [replace(collective, count=count) for collective, count in counts.items()]


def _collectives_of(site: Site, axis_sizes: Mapping[str, int]) -> Iterator[Collective]:
    axes = _axes(site.equation)
    if not axes or site.name in _SILENT or site.name.endswith("_done"):
        return
    kind = KINDS.get(site.name.removesuffix("_start"))
    if kind is None:
        raise ValueError(
            f"primitive {site.name} over mesh axes {axes}; only {', '.join(KINDS)} can be counted; "
            "add it to olmo_jax.inspect.jaxpr.KINDS"
        )
    axes = tuple(axis for axis in axes if axis_sizes[axis] > 1)
    operands = site.equation.invars[:1] if kind == "ragged_all_to_all" else site.equation.invars
    for operand in operands if axes else ():
        shape, dtype = _shape(operand), _dtype(operand)
        size = math.prod(shape) * dtype.itemsize
        yield Collective(kind, axes, str(dtype), shape, size, 0, site.scope, site.loops)


def _axes(equation: JaxprEqn) -> tuple[str, ...]:
    """Return the mesh axes of an equation; array dims, which some call axes too, are ints."""
    value = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def ring_bytes(collective: Collective, axis_sizes: Mapping[str, int]) -> float:
    """Return what one rank sends for one execution, see `mesh.collectives.ring_bytes`."""
    ranks = math.prod(axis_sizes[axis] for axis in collective.axes)
    return collectives_bytes.ring_bytes(collective.kind, collective.operand_bytes, ranks)


def sent_bytes(found: Iterable[Collective], axis_sizes: Mapping[str, int]) -> float:
    """Return what one rank sends for all of `found`, counts included (see `ring_bytes`)."""
    return sum(c.count * ring_bytes(c, axis_sizes) for c in found)


def float_reductions(jaxpr: AnyJaxpr, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Return the sums of floating-point values over ranks: what must be FP32 on the wire."""
    return [
        c
        for c in collectives(jaxpr, axis_sizes)
        if c.kind in ("reduce", "reduce_scatter") and jnp.issubdtype(c.dtype, jnp.floating)
    ]


def matmuls(jaxpr: AnyJaxpr) -> list[Matmul]:
    """Return every matrix product (dot, ragged dot, convolution) with its place and FLOPs.

    Every branch of a conditional is listed.

    Raises: ValueError where none can be counted: in a kernel, in a loop without trip count.
    """
    return [_matmul(site) for site in equations(jaxpr) if _multiplies(site)]


def matmul_flops(jaxpr: AnyJaxpr) -> int:
    """Count 2 m n k batch of every matrix product, times the lengths of the scans around it.

    What is asked for is counted: a dot under a mask counts whole, a ragged dot only its groups'
    rows (XLA:CPU and XLA:GPU do a multiple of that). Elementwise work is not counted.
    """
    return sum(product.flops * product.times for product in matmuls(jaxpr))


def _multiplies(site: Site) -> bool:
    if site.name in _KERNELS:
        raise ValueError(
            f"{site.name} at {site.scope or 'top level'}; the FLOPs of a kernel are not on the "
            "jaxpr; count with a backend in plain JAX"
        )
    if site.name not in _FLOPS:
        return False
    if any(loop.length is None for loop in site.loops):
        raise ValueError(
            f"{site.name} at {site.scope or 'top level'} stands in a loop without a known trip "
            "count; FLOPs need a static one; write lax.scan, or lax.fori_loop with Python bounds"
        )
    return True


def _matmul(site: Site) -> Matmul:
    lhs, rhs = site.equation.invars[:2]
    out = site.equation.outvars[0]
    return Matmul(
        operands=(_shape(lhs), _shape(rhs)),
        operand_dtypes=(str(_dtype(lhs)), str(_dtype(rhs))),
        shape=_shape(out),
        dtype=str(_dtype(out)),
        flops=_FLOPS[site.name](site.equation),
        times=site.times,
        scope=site.scope,
        loops=site.loops,
    )


def _dot_flops(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return _product_flops(equation, contracted)


def _ragged_dot_flops(equation: JaxprEqn) -> int:
    """Count a ragged contraction once: each group's output sums its own rows only."""
    # Rows are contracted: [R, in] x [R, out] -> [E, in, out]. The dense count would be E times too
    # large, as each row belongs to one of the E outputs.
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = _product_flops(equation, contracted)
    ragged = set(numbers.lhs_ragged_dimensions) & set(contracted)
    return flops // _shape(equation.invars[2])[-1] if ragged else flops


def _product_flops(equation: JaxprEqn, contracted: Sequence[int]) -> int:
    lhs = _shape(equation.invars[0])
    return 2 * math.prod(_shape(equation.outvars[0])) * math.prod(lhs[dim] for dim in contracted)


def _convolution_flops(equation: JaxprEqn) -> int:
    # An output element sums over all of the kernel but its feature dim.
    kernel = _shape(equation.invars[1])
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(_shape(equation.outvars[0])) * math.prod(kernel) // features


_FLOPS = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _convolution_flops,
}


def scatter_adds(jaxpr: AnyJaxpr) -> list[Site]:
    """Return the float scatters that do not promise unique indices: sums in no fixed order."""
    return [
        site for site in equations(jaxpr) if site.name in _SCATTERS and _may_repeat(site.equation)
    ]


def _may_repeat(equation: JaxprEqn) -> bool:
    floating = jnp.issubdtype(_dtype(equation.outvars[0]), jnp.inexact)
    return floating and not equation.params["unique_indices"]


def conditionals(jaxpr: AnyJaxpr) -> list[Site]:
    """Return every `cond` and `switch` that is left to run time."""
    return [site for site in equations(jaxpr) if site.name == "cond"]


def unbounded_loops(jaxpr: AnyJaxpr) -> list[Site]:
    """Return every `while`: only scans carry their trip count (a static fori_loop is a scan)."""
    return [site for site in equations(jaxpr) if site.name == "while"]


def callbacks(jaxpr: AnyJaxpr) -> list[Site]:
    """Return what calls the host: pure, io and debug callbacks, prints, in- and outfeeds."""
    names = ("callback", "debug_print", "infeed", "outfeed")
    return [site for site in equations(jaxpr) if any(name in site.name for name in names)]


def scan_values(jaxpr: AnyJaxpr) -> list[Value]:
    """Return carries and outputs of all scans; an output has its leading dim of iterations."""
    scans = (site for site in equations(jaxpr) if site.name == "scan")
    return [value for site in scans for value in _values_of(site)]


def _values_of(site: Site) -> Iterator[Value]:
    """Tell carries from outputs by rank: the parameters that number them differ by version."""
    (body,) = _bodies(site.equation)
    results = (body.jaxpr if isinstance(body, ClosedJaxpr) else body).outvars
    for outer, inner in zip(site.equation.outvars, results, strict=True):
        source = "carry" if len(_shape(outer)) == len(_shape(inner)) else "output"
        yield _value(site, source, outer)


def outputs(jaxpr: AnyJaxpr, *primitives: str) -> list[Value]:
    """Return what the equations of these primitives yield: `reduce_sum`, `add_any`, ..."""
    return [
        _value(site, site.name, out)
        for site in equations(jaxpr)
        if site.name in primitives
        for out in site.equation.outvars
    ]


def accumulators(jaxpr: AnyJaxpr) -> list[Value]:
    """Return the arrays that are written in place: those that `jax.new_ref` began with."""
    return [
        _value(site, site.name, site.equation.invars[0])
        for site in equations(jaxpr)
        if site.name == "new_ref"
    ]


def additions(jaxpr: AnyJaxpr) -> list[Value]:
    """Return what is added in place to an accumulator, or to a slice of one."""
    return [
        _value(site, site.name, site.equation.invars[1])
        for site in equations(jaxpr)
        if site.name == "addupdate"
    ]


def float_dtypes(jaxpr: AnyJaxpr, scope: str) -> set[str]:
    """Return the dtypes of all floating-point values computed under `scope` (a substring)."""
    dtypes = (
        _dtype(out)
        for site in equations(jaxpr)
        if scope in site.scope
        for out in site.equation.outvars
        if hasattr(out.aval, "dtype")
    )
    return {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}


def with_shapes(found: Iterable[Record], shapes: Iterable[Sequence[int]]) -> list[Record]:
    """Keep what has one of `shapes`, dims in any order and dims of size 1 aside.

    A weight gradient leaves its dot with dims permuted; test models with unlike dims tell it from
    an activation.
    """
    wanted = {_multiset(shape) for shape in shapes}
    return [record for record in found if _multiset(record.shape) in wanted]


def _multiset(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _value(site: Site, source: str, out: Any) -> Value:
    return Value(source, _shape(out), str(_dtype(out)), site.scope, site.loops)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype
