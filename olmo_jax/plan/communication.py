"""What one optimizer step sends between ranks: from the config and the sizes of the mesh alone.

Every collective of the step is here, the small ones included. Tests count the same on the step's
jaxpr. A rank of a pipeline that is idle in a tick, and an empty place, send as any other: one
program runs on all.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from olmo_jax.config.layers import is_routed, window_of
from olmo_jax.config.mesh_rules import PIECES
from olmo_jax.config.records import Config
from olmo_jax.config.residuals import kept
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES, expert_model_axes
from olmo_jax.mesh.rules import METHODS, Cuts, axes_used, cuts, replica_axes
from olmo_jax.plan.passes import Passes, microbatch_tokens, passes, row_positions
from olmo_jax.plan.placed import Leaf, leaves, parts
from olmo_jax.plan.static_sizes import ITEM_BYTES, head_copies, ring_hops

Kind = Literal["all_gather", "reduce_scatter", "reduce", "max", "all_to_all", "permute"]

Sizes = Mapping[str, int]

TOKEN_AXES = (*DENSE_DATA_AXES, "sequence")
"""The axes that divide the batch, by rows and by positions."""


def ring_bytes(kind: Kind, operand_bytes: int, ranks: int) -> float:
    """Return what one rank sends, by a ring over n ranks, if it puts in S = `operand_bytes`.

    Units: bytes. all_gather S (n-1), its operand being the shard; reduce_scatter and all_to_all
    S (n-1)/n; reduce and max 2 S (n-1)/n; permute S.
    """
    if kind == "all_gather":
        return float(operand_bytes * (ranks - 1))
    if kind == "permute":
        return float(operand_bytes)
    twice = 1 if kind in ("reduce_scatter", "all_to_all") else 2
    return twice * operand_bytes * (ranks - 1) / ranks


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


def communication(config: Config, sizes: Sizes) -> tuple[Traffic, ...]:
    """Return what a step sends, equal sorts merged; axes of size 1 send nothing.

    Raises: UserError if a parameter cannot be laid out on a mesh of these sizes.
    """
    totals: dict[_Sort, tuple[int, int]] = {}
    for sort, times, elements in _all(config, sizes):
        axes = tuple(axis for axis in sort.axes if sizes[axis] > 1)
        if axes and times:
            key = sort._replace(axes=axes)
            count, operand_bytes = totals.get(key, (0, 0))
            totals[key] = (count + times, operand_bytes + elements * ITEM_BYTES[sort.dtype])
    return tuple(
        Traffic(*sort, count, size, ring_bytes(sort.kind, size, parts(sort.axes, sizes)))
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


def _all(config: Config, sizes: Sizes) -> Iterator[_Sent]:
    placed, run = leaves(config, sizes), passes(config, sizes)
    yield from _divisors()
    if METHODS[config.parallel.method].resident:
        for leaf in placed:
            yield from _unit_traffic(config, leaf, run)
    yield from _stages(config, run, sizes)
    if sizes["sequence"] > 1:
        yield from {"ulysses": _ulysses, "ring": _ring}[config.parallel.context](config, run, sizes)
    yield from _experts(config, run, sizes)
    yield from _balance(config, run)
    for leaf in placed:
        yield from _boundary(config, leaf)
    yield from _norm(placed)
    yield from _metrics(config, len(placed))


def _divisors() -> Iterator[_Sent]:
    """The positions that count in the loss, and the real ones."""
    yield _Sent(_Sort("divisors", False, "reduce", TOKEN_AXES, "int32"), 2, 2)


def _gathers(
    what: str, in_loop: bool, where: Cuts, dtype: str, elements: int, times: int, sizes: Sizes
) -> Iterator[_Sent]:
    """Gather `elements`, in `times` pieces, dim by dim: what is gathered grows on the way."""
    for _, axes in where:
        yield _Sent(_Sort(what, in_loop, "all_gather", axes, dtype), times, elements)
        elements *= parts(axes, sizes)


def _scatters(
    what: str, in_loop: bool, where: Cuts, elements: int, times: int, sizes: Sizes
) -> Iterator[_Sent]:
    """Scatter the FP32 sums of `elements`, dim by dim: what is scattered shrinks on the way."""
    for _, axes in where:
        yield _Sent(_Sort(what, in_loop, "reduce_scatter", axes, "float32"), times, elements)
        elements //= parts(axes, sizes)


def _stages(config: Config, run: Passes, sizes: Sizes) -> Iterator[_Sent]:
    """What a pipeline moves between stages, and between the body and both ends of the model."""
    ranks = sizes["pipeline"]
    x = microbatch_tokens(config, sizes) * config.model.d_model
    rows = run.head_tokens * config.model.d_model

    def along(what: str, kind: Kind, elements: int, times: int) -> _Sent:
        sort = _Sort(what, True, kind, ("pipeline",), config.model.dtype)
        return _Sent(sort, times, times * elements)

    yield along("activations", "permute", x, run.num_body)
    yield along("activation gradients", "permute", x, run.num_body)
    yield along("rows of the head", "reduce_scatter", ranks * rows, run.num_last)
    yield along("rows of the head", "all_gather", rows, run.num_last)
    yield along("inputs of the body", "all_gather", x, run.num_first)
    yield along("inputs of the body", "reduce_scatter", ranks * x, run.num_first)


def _passes_of(leaf: Leaf, run: Passes) -> int:
    """Return how often a step passes the unit that the leaf belongs to, and so reads the leaf."""
    part = leaf.name.split(".")[0]
    return {"embedding": run.num_first, "leading": run.num_first, "body": run.num_body}.get(
        part, run.num_last
    )


def _layers_of(leaf: Leaf, run: Passes) -> int:
    """Return how many layers of the leaf one pass reads: of the body a stage's."""
    return len(run.body) if leaf.name.startswith("body.") else 1


def _forward_reads(config: Config, leaf: Leaf, run: Passes) -> int:
    """Return how often a step reads the weight: the head too reads a tied embedding."""
    tied = config.model.tie_embeddings and leaf.name == "embedding.weight"
    return _passes_of(leaf, run) + tied * run.num_last


def _backward_reads(config: Config, leaf: Leaf, run: Passes) -> int:
    """Return how often a step gathers the weight again for its gradient.

    The gradient of a lookup does not need the table; rows that a norm reads are looked up again if
    they were not kept.
    """
    if config.parallel.reshard != "full":
        return 0
    if leaf.name != "embedding.weight":
        return _passes_of(leaf, run)
    looked_up = config.model.embedding_norm and "embedding" not in kept(config)
    return looked_up * run.num_first + config.model.tie_embeddings * run.num_last


def _unit_traffic(config: Config, leaf: Leaf, run: Passes) -> Iterator[_Sent]:
    """What moves at the uses of a weight: what lies between `resident` and `compute`."""
    where = cuts(leaf.placed.compute, leaf.placed.resident)
    shard, dtype = leaf.elements(leaf.placed.resident), config.model.dtype
    layers = _layers_of(leaf, run)
    if config.parallel.reshard == "step":
        yield from _gathers("weights", False, where, dtype, shard, 1, leaf.sizes)
    else:
        reads = layers * (_forward_reads(config, leaf, run) + _backward_reads(config, leaf, run))
        of_all = reads * shard // leaf.layers
        yield from _gathers("weights", True, where, dtype, of_all, reads, leaf.sizes)
    uses = layers * _forward_reads(config, leaf, run)
    whole = uses * leaf.elements(leaf.placed.compute) // leaf.layers
    yield from _scatters("gradients", True, where, whole, uses, leaf.sizes)


def _boundary(config: Config, leaf: Leaf) -> Iterator[_Sent]:
    """What moves once a step: what lies between `resident` and `main`, and sums over replicas."""
    placed, sizes = leaf.placed, leaf.sizes
    where = cuts(placed.resident, placed.main)
    yield from _scatters("gradients", False, where, leaf.elements(placed.resident), 1, sizes)
    shard = leaf.elements(placed.main)
    yield _Sent(_Sort("gradients", False, "reduce", replica_axes(placed.main), "float32"), 1, shard)
    if METHODS[config.parallel.method].keeps_weights:
        yield from _gathers("weights", False, where, config.model.dtype, shard, 1, sizes)


def _over_sequence(what: str, kind: Kind, dtype: str, times: int, elements: int) -> _Sent:
    return _Sent(_Sort(what, True, kind, ("sequence",), dtype), times, times * elements)


def _ulysses(config: Config, run: Passes, sizes: Sizes) -> Iterator[_Sent]:
    """Heads for positions and back, whenever a layer is run."""
    model, saved, positions = config.model, kept(config), microbatch_tokens(config, sizes)
    copies = head_copies(model.num_kv_heads, sizes["sequence"])
    heads = {
        "exchanged_query": model.num_heads,
        "exchanged_key_value": 2 * model.num_kv_heads * copies,
        "exchanged_attention": model.num_heads,
    }
    runs = sum(times for _, times in run.layers())
    for name, number in heads.items():
        elements, times = positions * number * model.head_dim, runs * (2 + (name not in saved))
        yield _over_sequence("heads", "all_to_all", model.dtype, times, elements)


def _ring(config: Config, run: Passes, sizes: Sizes) -> Iterator[_Sent]:
    """Keys and values in every hop, and behind them backward their gradients."""
    model, saved, ranks = config.model, kept(config), sizes["sequence"]
    piece = row_positions(config, sizes) // PIECES["ring"]
    hops = sum(
        times * (len(ring_hops(piece, ranks, window_of(model, layer))) - 1)
        for layer, times in run.layers()
    )
    # The normaliser alone needs no values.
    values_again = "attention" not in saved
    keys_again = values_again or "attention_logsumexp" not in saved
    elements = microbatch_tokens(config, sizes) * model.num_kv_heads * model.head_dim
    yield _over_sequence("keys", "permute", model.dtype, hops * (2 + keys_again), elements)
    yield _over_sequence("values", "permute", model.dtype, hops * (2 + values_again), elements)
    what = "gradients of keys and values"
    yield _over_sequence(what, "permute", "float32", 2 * hops, elements)


def _experts(config: Config, run: Passes, sizes: Sizes) -> Iterator[_Sent]:
    """What routed layers send whenever they are run, and again where backward computes it anew."""
    model, saved, layers = config.model, kept(config), _routed_runs(config, run)
    tokens = microbatch_tokens(config, sizes)
    group = expert_model_axes(fold_sequence=config.parallel.fold_sequence)
    routes, features, dtype = tokens * model.top_k, tokens * model.d_model, model.dtype
    all_routes, all_features = routes * parts(group, sizes), features * parts(group, sizes)

    def along(what: str, kind: Kind, dtype: str, elements: int, runs: int) -> _Sent:
        number = runs * layers
        return _Sent(_Sort(what, True, kind, group, dtype), number, number * elements)

    plans = _forward_routings(config, run) + layers * ("route_plan" not in saved)
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


def _routed_runs(config: Config, run: Passes) -> int:
    """Return how often a step runs a routed layer forward."""
    return sum(times for layer, times in run.layers() if is_routed(config.model, layer))


def _scanned_once(config: Config, run: Passes) -> int:
    """Return how often a step computes what is the same in all routed layers of a scan.

    Autodiff takes it out of the scan over layers: a period's is left, and the single layers'.
    """
    if not config.model.num_routed_layers:
        return 0
    hoisted = len(run.body) - run.plan.period
    return _routed_runs(config, run) - hoisted * run.num_body


def _forward_routings(config: Config, run: Passes) -> int:
    """Return how many layers a step routes anew: uniform routes are the same in all of a scan."""
    if config.model.router.assignment == "uniform":
        return _scanned_once(config, run)
    return _routed_runs(config, run)


def _balance(config: Config, run: Passes) -> Iterator[_Sent]:
    """The counts of the balance loss, and its tokens, summed over the ranks of its scope."""
    model = config.model
    scope = model.router.balance_scope
    axes = {"instance": ("sequence",), "microbatch": (), "global": TOKEN_AXES}[scope]
    rows = config.train.microbatch if scope == "instance" else 1
    again = _routed_runs(config, run) * ("balance_counts" not in kept(config))
    # The tokens are the same in all layers.
    counts, tokens = _forward_routings(config, run), _scanned_once(config, run)
    for elements, runs in ((rows * model.num_experts, counts), (rows, tokens)):
        times = runs + again
        yield _Sent(_Sort("counts", True, "reduce", axes, "int32"), times, times * elements)


def _norm(placed: list[Leaf]) -> Iterator[_Sent]:
    """One number for each set of axes that divides some leaf."""
    for axes in {axes_used(leaf.placed.main) for leaf in placed}:
        yield _Sent(_Sort("norm", False, "reduce", axes, "float32"), 1, 1)


def _metrics(config: Config, num_leaves: int) -> Iterator[_Sent]:
    """Losses, router sums and counts of each layer; the stop flag, and a flag for each leaf."""
    layers = config.model.num_routed_layers
    yield _Sent(_Sort("metrics", False, "reduce", AXES, "float32"), 2, 2)
    if layers:
        yield _Sent(_Sort("metrics", False, "reduce", AXES, "float32"), 2, 2 * layers)
        counts = layers * (config.model.num_experts + 1)
        yield _Sent(_Sort("metrics", False, "reduce", AXES, "int32"), 2, counts)
    yield _Sent(_Sort("flags", False, "max", AXES, "int32"), 1, 1 + num_leaves)
