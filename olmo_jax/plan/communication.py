"""What one optimizer step sends between ranks: from the config and the sizes of the mesh alone.

Every collective of the step is here, the small ones included. Tests count the same on the step's
jaxpr. A rank of a pipeline that is idle in a tick, and a padding layer, send as any other: one
program runs on all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from olmo_jax.arch.activations import saved_names
from olmo_jax.arch.layers import is_routed, window_of
from olmo_jax.arch.sizes import ITEM_BYTES, PIECES, head_copies, ring_hops
from olmo_jax.mesh.axes import AXES, TOKEN_AXES, expert_model_axes
from olmo_jax.mesh.collectives import ring_bytes
from olmo_jax.mesh.layout import Layout, ShardedParameter
from olmo_jax.mesh.specs import (
    METHODS,
    AddedAxes,
    Sizes,
    added_axes,
    axes_used,
    num_shards,
    replica_axes,
)
from olmo_jax.plan.pass_counts import Passes, passes

Kind = Literal["all_gather", "reduce_scatter", "reduce", "max", "all_to_all", "permute"]


@dataclass(frozen=True)
class Traffic:
    """All that a step sends for one purpose, in one way.

    `in_loop` says that it belongs to the work on microbatches, and there is the more of it the more
    they are: the loop over them holds it, or, of a pipeline, the ticks and the first part's groups.
    What is not in the loop is sent once a step. `count` collectives a step, into which one rank
    puts `operand_bytes` in all, and for which it sends `sent_bytes` by a ring.
    """

    what: str
    in_loop: bool
    kind: Kind
    axes: tuple[str, ...]
    dtype: str
    count: int
    operand_bytes: int
    sent_bytes: float


class _Sort(NamedTuple):
    what: str
    in_loop: bool
    kind: Kind
    axes: tuple[str, ...]
    dtype: str


class _Sent(NamedTuple):
    """`times` collectives of a sort, into which one rank puts `elements` in all."""

    sort: _Sort
    times: int
    elements: int


def communication(layout: Layout) -> tuple[Traffic, ...]:
    """Return what a step sends, equal sorts merged; axes of size 1 send nothing.

    Raises: UserError if a parameter cannot be laid out on a mesh of these sizes.
    """
    totals: dict[_Sort, tuple[int, int]] = {}
    for sort, times, elements in _all(layout):
        axes = tuple(axis for axis in sort.axes if layout.sizes[axis] > 1)
        if axes and times:
            key = sort._replace(axes=axes)
            count, operand_bytes = totals.get(key, (0, 0))
            totals[key] = (count + times, operand_bytes + elements * ITEM_BYTES[sort.dtype])
    return tuple(
        Traffic(
            *sort, count, size, ring_bytes(sort.kind, size, num_shards(sort.axes, layout.sizes))
        )
        for sort, (count, size) in totals.items()
    )


def total_bytes(
    traffic: Iterable[Traffic], *, what: Iterable[str] | None = None, in_loop: bool | None = None
) -> float:
    """Return the bytes that one rank sends a step for these purposes, in or outside of the loop."""
    wanted = None if what is None else set(what)
    sent = (
        each.sent_bytes
        for each in traffic
        if (wanted is None or each.what in wanted) and in_loop in (None, each.in_loop)
    )
    return sum(sent, 0.0)


def _all(layout: Layout) -> Iterator[_Sent]:
    sharded, run = layout.sharded, passes(layout)
    yield from _divisors()
    if METHODS[layout.config.parallel.method].resident:
        for leaf in sharded:
            yield from _unit_traffic(layout, leaf, run)
    yield from _stages(layout, run)
    if layout.sizes["sequence"] > 1:
        yield from {"ulysses": _ulysses, "ring": _ring}[layout.config.parallel.context](layout, run)
    yield from _experts(layout, run)
    yield from _balance(layout, run)
    for leaf in sharded:
        yield from _boundary(layout, leaf)
    yield from _norm(sharded)
    yield from _metrics(layout, len(sharded))


def _divisors() -> Iterator[_Sent]:
    """The tokens of the loss mask, and those of the padding mask."""
    yield _Sent(_Sort("divisors", False, "reduce", TOKEN_AXES, "int32"), 2, 2)


def _gathers(
    what: str, in_loop: bool, where: AddedAxes, dtype: str, elements: int, times: int, sizes: Sizes
) -> Iterator[_Sent]:
    """Gather `elements`, in `times` pieces, dim by dim: what is gathered grows on the way."""
    # [8, 4096] with dim 0 in 2 shards and dim 1 in 4: S elements over the first axes, then 2 S over
    # the second. `ring_bytes` multiplies by ranks - 1 in each.
    for _, axes in where:
        yield _Sent(_Sort(what, in_loop, "all_gather", axes, dtype), times, elements)
        elements *= num_shards(axes, sizes)


def _scatters(
    what: str, in_loop: bool, where: AddedAxes, elements: int, times: int, sizes: Sizes
) -> Iterator[_Sent]:
    """Scatter the FP32 sums of `elements`, dim by dim: what is scattered shrinks on the way."""
    for _, axes in where:
        yield _Sent(_Sort(what, in_loop, "reduce_scatter", axes, "float32"), times, elements)
        elements //= num_shards(axes, sizes)


def _stages(layout: Layout, run: Passes) -> Iterator[_Sent]:
    """What a pipeline moves between stages, and between the body and both ends of the model."""
    ranks = layout.sizes["pipeline"]
    x = layout.microbatch_tokens * layout.model.d_model
    rows = run.head_tokens * layout.model.d_model

    def along(what: str, kind: Kind, elements: int, times: int) -> _Sent:
        sort = _Sort(what, True, kind, ("pipeline",), layout.model.dtype)
        return _Sent(sort, times, times * elements)

    yield along("activations", "permute", x, run.num_body)
    yield along("activation gradients", "permute", x, run.num_body)
    yield along("rows of the head", "reduce_scatter", ranks * rows, run.num_last)
    yield along("rows of the head", "all_gather", rows, run.num_last)
    yield along("inputs of the body", "all_gather", x, run.num_first)
    yield along("inputs of the body", "reduce_scatter", ranks * x, run.num_first)


def _passes_of(leaf: ShardedParameter, run: Passes) -> int:
    """Return how often a step passes the unit that the leaf belongs to, and so reads the leaf."""
    part = leaf.name.split(".")[0]
    return {"embedding": run.num_first, "leading": run.num_first, "body": run.num_body}.get(
        part, run.num_last
    )


def _layers_of(leaf: ShardedParameter, run: Passes) -> int:
    """Return how many layers of the leaf one pass reads: of the body a stage's."""
    return len(run.body) if leaf.name.startswith("body.") else 1


def _forward_reads(layout: Layout, leaf: ShardedParameter, run: Passes) -> int:
    """Return how often a step reads the weight: the head too reads a tied embedding."""
    tied = layout.model.tie_embeddings and leaf.name == "embedding.weight"
    return _passes_of(leaf, run) + tied * run.num_last


def _backward_reads(layout: Layout, leaf: ShardedParameter, run: Passes) -> int:
    """Return how often a step gathers the weight again for its gradient.

    The gradient of a lookup does not need the table; rows that a norm reads are looked up again if
    they were not saved.
    """
    if layout.config.parallel.reshard != "full":
        return 0
    if leaf.name != "embedding.weight":
        return _passes_of(leaf, run)
    looked_up = layout.model.embedding_norm and "embedding" not in saved_names(layout.config)
    return looked_up * run.num_first + layout.model.tie_embeddings * run.num_last


def _unit_traffic(layout: Layout, leaf: ShardedParameter, run: Passes) -> Iterator[_Sent]:
    """What moves at the uses of a weight: what lies between `resident` and `compute`."""
    where = added_axes(leaf.specs.compute, leaf.specs.resident)
    shard, dtype = leaf.elements(leaf.specs.resident), layout.model.dtype
    layers = _layers_of(leaf, run)
    if layout.config.parallel.reshard == "step":
        yield from _gathers("weights", False, where, dtype, shard, 1, leaf.sizes)
    else:
        reads = layers * (_forward_reads(layout, leaf, run) + _backward_reads(layout, leaf, run))
        of_all = reads * shard // leaf.num_layers
        yield from _gathers("weights", True, where, dtype, of_all, reads, leaf.sizes)
    uses = layers * _forward_reads(layout, leaf, run)
    whole = uses * leaf.elements(leaf.specs.compute) // leaf.num_layers
    yield from _scatters("gradients", True, where, whole, uses, leaf.sizes)


def _boundary(layout: Layout, leaf: ShardedParameter) -> Iterator[_Sent]:
    """What moves once a step: what lies between `resident` and `main`, and sums over replicas."""
    specs, sizes = leaf.specs, leaf.sizes
    where = added_axes(specs.resident, specs.main)
    yield from _scatters("gradients", False, where, leaf.elements(specs.resident), 1, sizes)
    shard = leaf.elements(specs.main)
    yield _Sent(_Sort("gradients", False, "reduce", replica_axes(specs.main), "float32"), 1, shard)
    if layout.keeps_weights:
        yield from _gathers("weights", False, where, layout.model.dtype, shard, 1, sizes)


def _over_sequence(what: str, kind: Kind, dtype: str, times: int, elements: int) -> _Sent:
    return _Sent(_Sort(what, True, kind, ("sequence",), dtype), times, times * elements)


def _ulysses(layout: Layout, run: Passes) -> Iterator[_Sent]:
    """Heads for positions and back, whenever a layer is run."""
    model, saved, positions = layout.model, saved_names(layout.config), layout.microbatch_tokens
    copies = head_copies(model.num_kv_heads, layout.sizes["sequence"])
    heads = {
        "exchanged_query": model.num_heads,
        "exchanged_key_value": 2 * model.num_kv_heads * copies,
        "exchanged_attention": model.num_heads,
    }
    runs = sum(times for _, times in run.layers())
    for name, number in heads.items():
        elements, times = positions * number * model.head_dim, runs * (2 + (name not in saved))
        yield _over_sequence("heads", "all_to_all", model.dtype, times, elements)


def _ring(layout: Layout, run: Passes) -> Iterator[_Sent]:
    """Keys and values in every hop, and behind them backward their gradients."""
    model, saved, ranks = layout.model, saved_names(layout.config), layout.sizes["sequence"]
    piece = layout.positions // PIECES["ring"]
    hops = sum(
        times * (len(ring_hops(piece, ranks, window_of(model, layer))) - 1)
        for layer, times in run.layers()
    )
    # The normaliser alone needs no values.
    values_again = "attention" not in saved
    keys_again = values_again or "attention_logsumexp" not in saved
    elements = layout.microbatch_tokens * model.num_kv_heads * model.head_dim
    yield _over_sequence("keys", "permute", model.dtype, hops * (2 + keys_again), elements)
    yield _over_sequence("values", "permute", model.dtype, hops * (2 + values_again), elements)
    what = "gradients of keys and values"
    yield _over_sequence(what, "permute", "float32", 2 * hops, elements)


def _experts(layout: Layout, run: Passes) -> Iterator[_Sent]:
    """What routed layers send whenever they are run, and again where backward rematerializes it."""
    model, saved, layers = layout.model, saved_names(layout.config), _routed_runs(layout, run)
    tokens = layout.microbatch_tokens
    group = expert_model_axes(fold_sequence=layout.config.parallel.fold_sequence)
    routes, features, dtype = tokens * model.top_k, tokens * model.d_model, model.dtype
    ranks = layout.num_expert_ranks
    all_routes, all_features = routes * ranks, features * ranks

    def along(what: str, kind: Kind, dtype: str, elements: int, runs: int) -> _Sent:
        number = runs * layers
        return _Sent(_Sort(what, True, kind, group, dtype), number, number * elements)

    plans = _forward_routings(layout, run) + layers * ("route_plan" not in saved)
    dispatches = 1 + ("expert_rows" not in saved)
    # Without a norm after it no gradient reads what came back from the experts.
    combines = 1 + ("combined" not in saved and model.norm != "pre")
    for elements, number in ((model.num_experts, plans), (routes, 2 * plans)):
        sort = _Sort("expert plan", True, "all_gather", group, "int32")
        yield _Sent(sort, number, number * elements)
    yield along("expert rows", "all_gather", dtype, features, dispatches)
    yield along("expert weights", "all_gather", "float32", routes, combines)
    yield along("expert rows", "reduce_scatter", "float32", all_features, combines)
    # Backward: of combine, then of dispatch.
    yield along("expert weights", "all_gather", "float32", routes, 1)
    yield along("expert rows", "all_gather", dtype, features, 1)
    yield along("expert weights", "reduce_scatter", "float32", all_routes, 1)
    yield along("expert rows", "reduce_scatter", "float32", all_features, 1)


def _routed_runs(layout: Layout, run: Passes) -> int:
    """Return how often a step runs a routed layer forward."""
    return sum(times for layer, times in run.layers() if is_routed(layout.model, layer))


def _scanned_once(layout: Layout, run: Passes) -> int:
    """Return how often a step computes what is the same in all routed layers of a scan.

    Autodiff takes it out of the scan over layers: a period's is left, and the single layers'.
    """
    # A body of 6 layers with a period of 2 is a scan of 3 iterations over 2 layers:
    #
    #     traced         scan of 3: [layer a, layer b]               6 runs
    #     under vjp      layer a, layer b, once before the scan      2 runs
    #
    # Partial evaluation moves what depends neither on the carry nor on an iteration's weights out
    # of the scan: counts of tokens, uniform routes. 6 - 2 = 4 runs fewer in each pass of the body.
    if not layout.model.num_routed_layers:
        return 0
    hoisted = len(run.body) - run.groups.period
    return _routed_runs(layout, run) - hoisted * run.num_body


def _forward_routings(layout: Layout, run: Passes) -> int:
    """Return how many layers a step routes anew: uniform routes are the same in all of a scan."""
    if layout.model.router.assignment == "uniform":
        return _scanned_once(layout, run)
    return _routed_runs(layout, run)


def _balance(layout: Layout, run: Passes) -> Iterator[_Sent]:
    """The counts of the balance loss, and its tokens, summed over the ranks of its scope."""
    model = layout.model
    scope = model.router.balance_scope
    axes = {"instance": ("sequence",), "microbatch": (), "global": TOKEN_AXES}[scope]
    rows = layout.train.microbatch if scope == "instance" else 1
    again = _routed_runs(layout, run) * ("balance_counts" not in saved_names(layout.config))
    # The tokens are the same in all layers.
    counts, tokens = _forward_routings(layout, run), _scanned_once(layout, run)
    for elements, runs in ((rows * model.num_experts, counts), (rows, tokens)):
        times = runs + again
        yield _Sent(_Sort("counts", True, "reduce", axes, "int32"), times, times * elements)


def _norm(sharded: list[ShardedParameter]) -> Iterator[_Sent]:
    """One number for each set of axes that divides some leaf."""
    for axes in {axes_used(leaf.specs.main) for leaf in sharded}:
        yield _Sent(_Sort("norm", False, "reduce", axes, "float32"), 1, 1)


def _metrics(layout: Layout, num_leaves: int) -> Iterator[_Sent]:
    """Losses, router sums and counts of each layer; the stop flag, and a flag for each leaf."""
    layers = layout.model.num_routed_layers
    yield _Sent(_Sort("metrics", False, "reduce", AXES, "float32"), 2, 2)
    if layers:
        yield _Sent(_Sort("metrics", False, "reduce", AXES, "float32"), 2, 2 * layers)
        counts = layers * (layout.model.num_experts + 1)
        yield _Sent(_Sort("metrics", False, "reduce", AXES, "int32"), 2, counts)
    yield _Sent(_Sort("flags", False, "max", AXES, "int32"), 1, 1 + num_leaves)
