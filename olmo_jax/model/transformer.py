"""The whole model: embedding, blocks (the homogeneous ones scanned), head.

Parameters are one flat dict from dotted names to arrays. Inside, a unit is what is read at once:
the embedding, one block, or the head; `Placement.read` turns each, as stored, into its weights.
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, Key

from olmo_jax.config.layers import is_routed, layer_plan, window_of
from olmo_jax.config.records import ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.errors import UserError
from olmo_jax.model.block import Block
from olmo_jax.model.initialise import Initialiser, RouterBias
from olmo_jax.model.moe import RouterSums, Surroundings, surroundings
from olmo_jax.model.norm import RMSNorm
from olmo_jax.model.placement import Placement, Tree
from olmo_jax.ops.embedding import embed

Params = dict[str, Array]
"""Dotted name to array: `body.attention.q`, `leading.0.mlp.down`, `head.weight`."""


def _norm(model: ModelConfig, make: Initialiser) -> RMSNorm:
    return RMSNorm(make.inside("norm"), (model.d_model,), ("d_model",), eps=model.norm_eps)


class Embedding(nnx.Module):
    """Token rows, scaled, then normalised if the config says so.

    Source: olmo_core 3.0.0, nn/ddp/model.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.model = model
        shape, dims = (model.vocab_size, model.d_model), ("vocab", "d_model")
        self.weight = make("weight", shape, dims, "embedding")
        self.norm = _norm(model, make) if model.embedding_norm else None

    def __call__(self, tokens: Int32[Array, "B L"]) -> Float[Array, "B L D"]:
        x = embed(self.weight[...], tokens, jnp.dtype(self.model.dtype))
        x = checkpoint_name(x, "embedding")
        # In FP32: sqrt(d_model) itself would be rounded to the compute dtype.
        x = (x.astype(jnp.float32) * self.model.embedding_multiplier).astype(x.dtype)
        return x if self.norm is None else self.norm(x)


class Head(nnx.Module):
    """The last norm and, unless it is the embedding's, the weight of the logits."""

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.norm = _norm(model, make)
        shape, dims = (model.d_model, model.vocab_size), ("d_model", "vocab")
        self.weight = None if model.tie_embeddings else make("weight", shape, dims, "head")


class Transformer(nnx.Module):
    """All leaves of the model, with values that depend on (seed, name, layer) alone."""

    def __init__(self, model: ModelConfig, key: Key[Array, ""]):
        plan, make = layer_plan(model), partial(Initialiser, key, model)

        def single(layer: int) -> Block:
            return Block(model, make("", (layer,)), routed=is_routed(model, layer))

        self.embedding = Embedding(model, make("embedding."))
        self.leading = nnx.List([single(layer) for layer in plan.leading])
        self.body = Block(model, make("", plan.body, True), routed=is_routed(model, plan.body[0]))
        self.trailing = nnx.List([single(layer) for layer in plan.trailing])
        self.head = Head(model, make("head."))


def _flatten(tree: Tree) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}


def _leaves(model: ModelConfig, key: Key[Array, ""]) -> tuple[Params, Params]:
    _, trained, bias = nnx.split(Transformer(model, key), nnx.Param, RouterBias)
    return _flatten(nnx.to_pure_dict(trained)), _flatten(nnx.to_pure_dict(bias))


def initialise(model: ModelConfig, seed: int) -> tuple[Params, Params]:
    """Return the FP32 (parameters, router biases) of a run's first step."""
    return _leaves(model, jax.random.key(seed))


@cache
def logical_dims(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the logical dim names of every leaf, router biases included."""
    abstract = nnx.eval_shape(lambda: Transformer(model, jax.random.key(0)))
    flat = nnx.to_flat_state(nnx.state(abstract))
    return {".".join(map(str, path)): variable.get_metadata()["dims"] for path, variable in flat}


@cache
def _graphs(model: ModelConfig) -> dict[str, Any]:
    """Return how each kind of unit is put together, without its values."""
    make = Initialiser(jax.random.key(0), model, layers=(0,))
    units = {
        "embedding": lambda: Embedding(model, make),
        "dense": lambda: Block(model, make, routed=False),
        "routed": lambda: Block(model, make, routed=True),
        "head": lambda: Head(model, make),
    }
    if not model.num_routed_layers:
        del units["routed"]
    return {name: nnx.split(nnx.eval_shape(unit))[0] for name, unit in units.items()}


def check_leaves(model: ModelConfig, params: Mapping[str, Any]) -> None:
    """Refuse parameters that lack a leaf of the model, or have one that it has not.

    Raises: UserError that names the leaves: put together, they would be taken for one another.
    """
    wanted = logical_dims(model).keys()
    missing, extra = sorted(wanted - params.keys()), sorted(params.keys() - wanted)
    if missing or extra:
        raise UserError(
            f"parameters lack {missing or 'nothing'} and have {extra or 'nothing'} that the model "
            f"does not; it has {len(wanted)} leaves, router biases included; give exactly those of "
            "olmo_jax.model.transformer.initialise"
        )


def unit(params: dict[str, Any], prefix: str) -> Tree:
    """Return the leaves below `prefix` as nested dicts: a unit as it is stored."""
    inside = {
        tuple(name[len(prefix) + 1 :].split(".")): leaf
        for name, leaf in params.items()
        if name.startswith(f"{prefix}.")
    }
    return unflatten_dict(inside)


def _embed(
    model: ModelConfig, placement: Placement, stored: Tree, tokens: Int32[Array, "B L"]
) -> Float[Array, "B L D"]:
    return nnx.merge(_graphs(model)["embedding"], placement.read(stored))(tokens)


def _block(
    model: ModelConfig,
    stored: Tree,
    x: Float[Array, "B L D"],
    around: Surroundings,
    layer: Int32[Array, ""],
    *,
    kind: str,
    window: int | None,
    placement: Placement,
    seed: int,
    training: bool,
    member: int | None,
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Run one block; of a period's leaves it takes the layer `member`.

    Here, and not before: what backward keeps is then the period as it is scanned, not a copy.
    """
    if member is not None:
        stored = jax.tree.map(lambda leaf: lax.index_in_dim(leaf, member, keepdims=False), stored)
    block = nnx.merge(_graphs(model)[kind], placement.read(stored))
    return block(x, around, placement, window=window, layer=layer, seed=seed, training=training)


def by_period(model: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves with the body's stacked as [periods, layers of a period, ...].

    So they are scanned, one period of the window pattern at a time; and so an accumulator must lie
    for its layers' gradients to be added in place.
    """
    plan = layer_plan(model)
    shape = (len(plan.body) // plan.period, plan.period)
    return {
        name: leaf.reshape(*shape, *leaf.shape[1:]) if name.startswith("body.") else leaf
        for name, leaf in params.items()
    }


def _scan_body(
    model: ModelConfig,
    run: Any,
    stored: Tree,
    x: Float[Array, "B L D"],
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Scan the body, one period of the window pattern at a time."""
    plan = layer_plan(model)
    layers = jnp.array(plan.body, jnp.int32).reshape(-1, plan.period)

    def one_period(x: Array, period: tuple[Tree, Array]) -> tuple[Array, RouterSums | None]:
        stored, layers = period
        sums = []
        for member in range(plan.period):
            number = plan.body[member]
            x, layer_sums = run(stored, x, layers[member], number, member=member)
            sums.append(layer_sums)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *sums)

    x, sums = lax.scan(one_period, x, (stored, layers))
    return x, jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sums)


def forward(
    model: ModelConfig,
    params: dict[str, Any],
    batch: Batch,
    placement: Placement,
    *,
    step: Int32[Array, ""],
    seed: int,
    training: bool,
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Return the hidden state before the head's norm, and each routed layer's sums, stacked.

    `params` are as `placement` stores them, and the body's lie `by_period`.
    """
    plan = layer_plan(model)
    around = surroundings(batch, placement, step)

    def run(
        stored: Tree, x: Array, layer: Array, number: int, *, member: int | None = None
    ) -> tuple[Array, RouterSums | None]:
        settings = {
            "kind": "routed" if is_routed(model, number) else "dense",
            "window": window_of(model, number),
            "placement": placement,
            "seed": seed,
            "training": training,
            "member": member,
        }
        # XLA takes the loop away from a scan of one period, and only a loop keeps the two
        # computations of a value apart.
        scanned = member is not None and len(plan.body) > plan.period
        block = placement.recomputed(partial(_block, model, **settings), scanned=scanned)
        return block(stored, x, around, layer)

    embed_tokens = placement.recomputed(partial(_embed, model, placement))
    x, parts = embed_tokens(unit(params, "embedding"), batch.tokens), []
    for i, layer in enumerate(plan.leading):
        x, sums = run(unit(params, f"leading.{i}"), x, jnp.int32(layer), layer)
        parts.append(sums)
    x, sums = _scan_body(model, run, unit(params, "body"), x)
    singles = []
    for i, layer in enumerate(plan.trailing):
        x, single = run(unit(params, f"trailing.{i}"), x, jnp.int32(layer), layer)
        singles.append(single)
    return x, _stack([*parts], sums, singles)


def _stack(
    leading: list[RouterSums | None], body: RouterSums | None, trailing: list[RouterSums | None]
) -> RouterSums | None:
    """Put the routed layers' sums in layer order along a leading dim."""
    if body is None:
        return None
    alone = [jax.tree.map(lambda v: v[None], sums) for sums in leading if sums is not None]
    after = [jax.tree.map(lambda v: v[None], sums) for sums in trailing]
    return jax.tree.map(lambda *values: jnp.concatenate(values), *alone, body, *after)


def head_units(model: ModelConfig, params: dict[str, Any]) -> tuple[Tree, ...]:
    """Return the units that the head reads, as they are stored."""
    names = ("head", "embedding") if model.tie_embeddings else ("head",)
    return tuple(unit(params, name) for name in names)


def head_input(
    model: ModelConfig,
    units: tuple[Tree, ...],
    hidden: Float[Array, "B L D"],
    placement: Placement,
) -> tuple[Float[Array, "B L D"], Float[Array, "D V"]]:
    """Return the normalised hidden state and the weight that makes logits of it."""
    head = nnx.merge(_graphs(model)["head"], placement.read(units[0]))
    normed = head.norm(hidden)
    if head.weight is not None:
        return normed, head.weight[...]
    return normed, placement.read(units[1]["weight"]).T


def routed_rows(model: ModelConfig, names: Iterable[str]) -> list[int | slice]:
    """Return where each router leaf's layers stand among the routed layers, in layer order.

    An index for a leaf of one layer, a slice for the stacked ones: what selects its rows from
    arrays whose leading dim counts routed layers.
    """
    plan = layer_plan(model)
    first = {"leading": 0, "body": plan.body[0], "trailing": plan.body[-1] + 1}
    rows: list[int | slice] = []
    for name in names:
        group, number = name.split(".")[:2]
        start = first[group] - model.num_dense_layers
        if group == "body":
            rows.append(slice(start, start + len(plan.body)))
        else:
            rows.append(start + int(number))
    return rows
