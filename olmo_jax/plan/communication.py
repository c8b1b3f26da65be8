"""What one optimizer step sends between ranks: from the config and the sizes of the mesh alone.

Every collective of the step is here, the small ones included. Tests count the same on the step's
jaxpr. Stages of a pipeline send more: that is not here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from olmo_jax.config.layers import layer_plan, window_of
from olmo_jax.config.records import Config
from olmo_jax.config.residuals import kept
from olmo_jax.config.rules import PIECES
from olmo_jax.mesh.axes import AXES, DENSE_DATA_AXES, expert_model_axes
from olmo_jax.mesh.rules import METHODS, Cuts, axes_used, cuts, replica_axes
from olmo_jax.plan.placed import ITEM_BYTES, Leaf, leaves, parts
from olmo_jax.plan.static_sizes import head_copies, num_microbatches, padded_length, ring_hops

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

    `in_loop` says that the loop over microbatches holds it. `count` collectives a step, into which
    one rank puts `operand_bytes` in all, and for which it sends `sent_bytes` by a ring.
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
    placed = leaves(config, sizes)
    yield from _divisors()
    if METHODS[config.parallel.method].resident:
        for leaf in placed:
            yield from _unit_traffic(config, leaf, num_microbatches(config.train, sizes))
    if sizes["sequence"] > 1:
        yield from {"ulysses": _ulysses, "ring": _ring}[config.parallel.context](config, sizes)
    yield from _experts(config, sizes)
    yield from _balance(config, num_microbatches(config.train, sizes))
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


def _forward_reads(config: Config, leaf: Leaf) -> int:
    """Return how often one microbatch reads the weight: the head too reads a tied embedding."""
    return 1 + (config.model.tie_embeddings and leaf.name == "embedding.weight")


def _backward_reads(config: Config, leaf: Leaf) -> int:
    """Return how often one microbatch gathers the weight again for its gradient.

    The gradient of a lookup does not need the table; rows that a norm reads are looked up again if
    they were not kept.
    """
    if config.parallel.reshard != "full":
        return 0
    if leaf.name != "embedding.weight":
        return 1
    looked_up = config.model.embedding_norm and "embedding" not in kept(config)
    return looked_up + config.model.tie_embeddings


def _unit_traffic(config: Config, leaf: Leaf, microbatches: int) -> Iterator[_Sent]:
    """What moves at the uses of a weight: what lies between `resident` and `compute`."""
    where = cuts(leaf.placed.compute, leaf.placed.resident)
    shard, dtype = leaf.elements(leaf.placed.resident), config.model.dtype
    if config.parallel.reshard == "step":
        yield from _gathers("weights", False, where, dtype, shard, 1, leaf.sizes)
    else:
        reads = _forward_reads(config, leaf) + _backward_reads(config, leaf)
        reads *= microbatches
        times = reads * leaf.layers
        yield from _gathers("weights", True, where, dtype, reads * shard, times, leaf.sizes)
    uses = microbatches * _forward_reads(config, leaf)
    whole = uses * leaf.elements(leaf.placed.compute)
    yield from _scatters("gradients", True, where, whole, uses * leaf.layers, leaf.sizes)


def _boundary(config: Config, leaf: Leaf) -> Iterator[_Sent]:
    """What moves once a step: what lies between `resident` and `main`, and sums over replicas."""
    placed, sizes = leaf.placed, leaf.sizes
    where = cuts(placed.resident, placed.main)
    yield from _scatters("gradients", False, where, leaf.elements(placed.resident), 1, sizes)
    shard = leaf.elements(placed.main)
    yield _Sent(_Sort("gradients", False, "reduce", replica_axes(placed.main), "float32"), 1, shard)
    if METHODS[config.parallel.method].keeps_weights:
        yield from _gathers("weights", False, where, config.model.dtype, shard, 1, sizes)


def _local_positions(config: Config, sizes: Sizes) -> int:
    """Return the positions of one microbatch that a device holds, padding included."""
    train, ranks = config.train, sizes["sequence"]
    length = padded_length(train.sequence_length, config.parallel.context, ranks)
    return train.microbatch * length // ranks


def _over_sequence(
    what: str, kind: Kind, dtype: str, times: int, elements: int, config: Config, sizes: Sizes
) -> _Sent:
    """Send `elements` over `sequence`, so often in each microbatch."""
    times *= num_microbatches(config.train, sizes)
    return _Sent(_Sort(what, True, kind, ("sequence",), dtype), times, times * elements)


def _ulysses(config: Config, sizes: Sizes) -> Iterator[_Sent]:
    """Heads for positions and back in every layer."""
    model, saved, positions = config.model, kept(config), _local_positions(config, sizes)
    copies = head_copies(model.num_kv_heads, sizes["sequence"])
    heads = {
        "exchanged_query": model.num_heads,
        "exchanged_key_value": 2 * model.num_kv_heads * copies,
        "exchanged_attention": model.num_heads,
    }
    for name, number in heads.items():
        times = model.num_layers * (2 + (name not in saved))
        elements = positions * number * model.head_dim
        yield _over_sequence("heads", "all_to_all", model.dtype, times, elements, config, sizes)


def _ring(config: Config, sizes: Sizes) -> Iterator[_Sent]:
    """Keys and values in every hop, and behind them backward their gradients."""
    model, saved, positions = config.model, kept(config), _local_positions(config, sizes)
    piece = positions // config.train.microbatch // PIECES["ring"]
    hops = sum(
        len(ring_hops(piece, sizes["sequence"], window_of(model, layer))) - 1
        for layer in range(model.num_layers)
    )
    # The normaliser alone needs no values.
    values_again = "attention" not in saved
    keys_again = values_again or "attention_logsumexp" not in saved
    elements = positions * model.num_kv_heads * model.head_dim
    times = {"keys": hops * (2 + keys_again), "values": hops * (2 + values_again)}
    for what, number in times.items():
        yield _over_sequence(what, "permute", model.dtype, number, elements, config, sizes)
    yield _over_sequence(
        "gradients of keys and values", "permute", "float32", 2 * hops, elements, config, sizes
    )


def _experts(config: Config, sizes: Sizes) -> Iterator[_Sent]:
    """What routed layers send in every microbatch, and again where backward computes it anew."""
    model, train, saved = config.model, config.train, kept(config)
    microbatches, layers = num_microbatches(train, sizes), model.num_routed_layers
    tokens = _local_positions(config, sizes)
    group = expert_model_axes(fold_sequence=config.parallel.fold_sequence)
    routes, features, dtype = tokens * model.top_k, tokens * model.d_model, model.dtype
    all_routes, all_features = routes * parts(group, sizes), features * parts(group, sizes)

    def along(what: str, kind: Kind, dtype: str, elements: int, runs: int) -> _Sent:
        number = runs * layers * microbatches
        return _Sent(_Sort(what, True, kind, group, dtype), number, number * elements)

    plans = _forward_routings(config) + layers * ("route_plan" not in saved)
    dispatches = 1 + ("expert_rows" not in saved)
    # Without a norm after it no gradient reads what came back from the experts.
    combines = 1 + ("combined" not in saved and model.norm != "pre")
    for elements, times in ((model.num_experts, plans), (routes, 2 * plans)):
        number = times * microbatches
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


def _scanned_once(config: Config) -> int:
    """Return how often a microbatch computes what is the same in all routed layers of the scan.

    Autodiff takes it out of the scan over layers: a period's is left, and the single layers'.
    """
    plan, layers = layer_plan(config.model), config.model.num_routed_layers
    return layers - len(plan.body) + plan.period if layers else 0


def _forward_routings(config: Config) -> int:
    """Return how many layers of a microbatch route anew: uniform routes are the same in all."""
    if config.model.router.assignment == "uniform":
        return _scanned_once(config)
    return config.model.num_routed_layers


def _balance(config: Config, microbatches: int) -> Iterator[_Sent]:
    """The counts of the balance loss, and its tokens, summed over the ranks of its scope."""
    model = config.model
    scope = model.router.balance_scope
    axes = {"instance": ("sequence",), "microbatch": (), "global": TOKEN_AXES}[scope]
    rows = config.train.microbatch if scope == "instance" else 1
    again = model.num_routed_layers * ("balance_counts" not in kept(config))
    # The tokens are the same in all layers.
    counts, tokens = _forward_routings(config), _scanned_once(config)
    for elements, runs in ((rows * model.num_experts, counts), (rows, tokens)):
        times = microbatches * (runs + again)
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
