"""A function split into a forward and a backward that run at different times.

What the backward reads is of three kinds: inputs that it gets too (weights, which the function
closes over, and a microbatch's data); what depends on weights alone (a chunk's slice of them, a
gathered weight), which is rematerialized; and the other residuals, which are saved.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import Array, Float32, Int32

from olmo_jax.ops.varying import vary_everywhere
from olmo_jax.parallel.pipeline.parts import Tree

Function = Callable[..., tuple[Tree, Float32[Array, ""], Tree]]
"""(accumulators, x, data, *chunk) to (output, share of the objective, sums)."""


class Known(NamedTuple):
    """What forward and backward both get: a microbatch's data, and the body's chunk, if any."""

    data: Tree
    chunk: tuple[Int32[Array, ""], ...] = ()


class Result(NamedTuple):
    """What a forward yields; `saved` is for its backward."""

    output: Tree
    sums: Tree
    saved: list[Array]


@dataclass(frozen=True)
class DeferredVjp:
    """One function, traced once. `sources` says where the backward finds each of its residuals.

    `rematerialize` returns those that depend on weights alone, or are data, from the inputs that
    `rematerialize_inputs` numbers.
    """

    traced: ClosedJaxpr
    results: Any
    rematerialize: ClosedJaxpr
    rematerialize_inputs: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]
    pull: Any

    @property
    def shapes(self) -> Result:
        """Return the shapes of a forward's results."""
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.traced.out_avals]
        return self._result(leaves)

    def _result(self, leaves: list[Any]) -> Result:
        size = self.results.num_leaves
        output, sums = jax.tree.unflatten(self.results, leaves[:size])
        return Result(output, sums, leaves[size:])

    def forward(self, accumulators: Tree, x: Tree, known: Known) -> Result:
        """Run the function."""
        return self._result(jaxpr_as_fun(self.traced)(*jax.tree.leaves((accumulators, x, known))))

    def backward(
        self,
        saved: Sequence[Array],
        accumulators: Tree,
        x: Tree,
        known: Known,
        cotangents: tuple[Tree, Float32[Array, ""]],
        gradients: Tree,
    ) -> tuple[Tree, Tree]:
        """Return `gradients` with those of the accumulators added in place, and the gradient of x.

        Of x only the structure, shapes and dtypes matter.
        """
        inputs = jax.tree.leaves((accumulators, x, known))
        computed = jaxpr_as_fun(self.rematerialize)(*(inputs[i] for i in self.rematerialize_inputs))
        found = {"saved": saved, "rematerialized": computed}
        pull = jax.tree.unflatten(self.pull, [found[kind][i] for kind, i in self.sources])
        # `with_refs` adds each cotangent to its ref where the backward makes it, so there is no
        # second tree of gradients.
        totals = jax.tree.map(jax.new_ref, (gradients, jax.tree.map(jnp.zeros_like, x)))
        pull.with_refs(*totals)(cotangents)
        return jax.tree.map(jax.freeze, totals)


def deferred_vjp(function: Function, accumulators: Tree, x: Tree, known: Known) -> DeferredVjp:
    """Trace `function(accumulators, x, data, *chunk)`, for arguments like these.

    Gradients are those of `accumulators` and x. What the function closes over must be the same
    whenever it runs. To save little, put its layers under `jax.checkpoint` with the names to save.
    """
    trees: dict[str, Any] = {}

    # jax.vjp returns the backward as a pytree whose leaves are its residuals. Traced as outputs,
    # each residual is a variable of one jaxpr, and the equations say what it is computed from:
    #
    #     weights (constvars), accumulators, chunk -> slice, gather   rematerialized
    #     data, as it is                                              rematerialized: an input
    #     what x, or a function of data, reaches                      saved
    #
    # Residuals may be NumPy's: a constant of the function.
    def forward(accumulators: Tree, x: Tree, known: Known) -> tuple[list[Array], list[Any]]:
        def share_of(accumulators: Tree, x: Tree) -> tuple[Tree, Tree]:
            output, share, sums = vary_everywhere(
                function(accumulators, x, known.data, *known.chunk)
            )
            return (output, share), sums

        (output, _), pull, sums = jax.vjp(share_of, accumulators, x, has_aux=True)
        residuals, trees["pull"] = jax.tree.flatten(pull)
        results, trees["results"] = jax.tree.flatten((output, sums))
        return results, residuals

    traced = jax.make_jaxpr(forward)(accumulators, x, known)
    jaxpr, size = traced.jaxpr, trees["results"].num_leaves
    inputs = jax.tree.unflatten(jax.tree.structure((accumulators, x, known)), jaxpr.invars)
    weights = [*jaxpr.constvars, *jax.tree.leaves((inputs[0], inputs[2].chunk))]
    there = _follows_from(jaxpr, weights) | set(jax.tree.leaves(inputs[2].data))
    saved, computed, sources = _sort(jaxpr.outvars[size:], there)
    # Without its dead code the rule is those slices and gathers, and `used` the inputs they read.
    rule, used = partial_eval.dce_jaxpr(jaxpr.replace(outvars=computed), True)
    return DeferredVjp(
        traced=_with_outputs(traced, [*jaxpr.outvars[:size], *saved]),
        results=trees["results"],
        rematerialize=ClosedJaxpr(rule, traced.consts),
        rematerialize_inputs=tuple(i for i, is_used in enumerate(used) if is_used),
        sources=sources,
        pull=trees["pull"],
    )


def forward_only_vjp(function: Function, x: Tree, known: Known) -> DeferredVjp:
    """Trace `function(None, x, data, *chunk)` for its forward alone; accumulators are None."""
    trees: dict[str, Any] = {}

    def forward(x: Tree, known: Known) -> list[Array]:
        output, _, sums = vary_everywhere(function(None, x, known.data, *known.chunk))
        results, trees["results"] = jax.tree.flatten((output, sums))
        return results

    traced = jax.make_jaxpr(forward)(x, known)
    return DeferredVjp(traced, trees["results"], _with_outputs(traced, []), (), (), None)


def _with_outputs(traced: ClosedJaxpr, outputs: list[Any]) -> ClosedJaxpr:
    return ClosedJaxpr(traced.jaxpr.replace(outvars=outputs), traced.consts)


def _follows_from(jaxpr: Jaxpr, given: Iterable[Any]) -> set[Any]:
    """Return all variables that are functions of `given` alone."""
    known = set(given)
    # One pass is enough: equations stand in the order in which they run.
    for equation in jaxpr.eqns:
        if all(isinstance(var, Literal) or var in known for var in equation.invars):
            known.update(equation.outvars)
    return known


def _sort(
    outputs: Sequence[Any], there: set[Any]
) -> tuple[list[Any], list[Any], tuple[tuple[str, int], ...]]:
    """Return what is saved, what is rematerialized, and in which of the two each output is."""
    lists: dict[str, list[Any]] = {"saved": [], "rematerialized": []}
    sources = []
    for var in outputs:
        kind = "rematerialized" if isinstance(var, Literal) or var in there else "saved"
        # One variable may be several residuals. By identity: literals of equal value are equal.
        if not any(var is other for other in lists[kind]):
            lists[kind].append(var)
        index = next(i for i, other in enumerate(lists[kind]) if other is var)
        sources.append((kind, index))
    return lists["saved"], lists["rematerialized"], tuple(sources)
