"""The whole model: embedding, blocks (the homogeneous ones scanned), head.

Parameters are one flat dict from dotted names to arrays. Inside, a unit is what is read at once:
the embedding, one block, or the head; `Placement.read` turns each, as stored, into its weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, Key

from olmo_jax.config.layers import Grid, is_routed, layer_plan, window_of
from olmo_jax.config.records import ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.errors import UserError
from olmo_jax.mesh.rules import STACKED, STAGED
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
    """All leaves of the model, with values that depend on (seed, name, layer) alone.

    The body's are stacked by layer, or by chunk, stage and place if `body` divides it.
    """

    def __init__(self, model: ModelConfig, key: Key[Array, ""], body: Grid | None = None):
        plan, make = layer_plan(model), partial(Initialiser, key, model)

        def single(layer: int) -> Block:
            return Block(model, make("", np.array(layer)), routed=is_routed(model, layer))

        self.embedding = Embedding(model, make("embedding."))
        self.leading = nnx.List([single(layer) for layer in plan.leading])
        layers, dims = np.array(plan.body), (STACKED,)
        if body is not None:
            layers, dims = body.model_layers(plan), STAGED
        routed = is_routed(model, plan.body[0])
        self.body = Block(model, make("", layers, dims), routed=routed)
        self.trailing = nnx.List([single(layer) for layer in plan.trailing])
        self.head = Head(model, make("head."))


def _flatten(tree: Tree) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}


def initialise(model: ModelConfig, seed: int, body: Grid | None = None) -> tuple[Params, Params]:
    """Return the FP32 (parameters, router biases) of a run's first step.

    With `body` its parameters are [chunks, ranks, places, ...], each made where it stands.
    """
    whole, parts = jax.random.key(seed), (nnx.Param, RouterBias)
    _, trained, bias = nnx.split(Transformer(model, whole, body), *parts)
    if body is not None:
        _, _, bias = nnx.split(Transformer(model, whole), *parts)
    return _flatten(nnx.to_pure_dict(trained)), _flatten(nnx.to_pure_dict(bias))


@cache
def logical_dims(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the logical dim names of every leaf, router biases included."""
    abstract = nnx.eval_shape(lambda: Transformer(model, jax.random.key(0)))
    flat = nnx.to_flat_state(nnx.state(abstract))
    return {".".join(map(str, path)): variable.get_metadata()["dims"] for path, variable in flat}


@cache
def _graphs(model: ModelConfig) -> dict[str, Any]:
    """Return how each kind of unit is put together, without its values."""
    make = Initialiser(jax.random.key(0), model)
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


Take = Callable[[Tree], Tree]
"""Takes one block's leaves, as stored, out of those that a loop over blocks has at hand."""


def take_member(member: int) -> Take:
    """Return what takes the layer `member` of a period's leaves."""
    return partial(jax.tree.map, lambda leaf: lax.index_in_dim(leaf, member, keepdims=False))


@dataclass(frozen=True)
class Walk:
    """One microbatch on its way through the model; each method is one unit of it."""

    model: ModelConfig
    placement: Placement
    around: Surroundings
    seed: int
    training: bool

    def embed(self, stored: Tree, tokens: Int32[Array, "B L"]) -> Float[Array, "B L D"]:
        """Return the rows of the embedding."""

        def unit(stored: Tree, tokens: Array) -> Array:
            weights, tokens = self.placement.read(stored, tokens)
            return nnx.merge(_graphs(self.model)["embedding"], weights)(tokens)

        return self.placement.recomputed(unit)(stored, tokens)

    def block(
        self,
        stored: Tree,
        x: Float[Array, "B L D"],
        layer: Int32[Array, ""] | int,
        *,
        like: int,
        take: Take | None = None,
        scanned: bool = False,
    ) -> tuple[Float[Array, "B L D"], RouterSums | None]:
        """Run block number `layer`, of the kind and window that the layer `like` has.

        `take` gets its leaves out of those of a loop. Here, and not before: what backward keeps is
        then what is looped over, not a copy.
        """
        model = self.model
        kind = "routed" if is_routed(model, like) else "dense"

        def unit(
            stored: Tree, x: Array, around: Surroundings, layer: Array
        ) -> tuple[Array, RouterSums | None]:
            weights, x = self.placement.read(stored if take is None else take(stored), x)
            block = nnx.merge(_graphs(model)[kind], weights)
            return block(
                x,
                around,
                self.placement,
                window=window_of(model, like),
                layer=layer,
                seed=self.seed,
                training=self.training,
            )

        unit_of_loop = self.placement.recomputed(unit, scanned=scanned)
        return unit_of_loop(stored, x, self.around, jnp.asarray(layer, jnp.int32))


def walk(
    model: ModelConfig,
    batch: Batch,
    placement: Placement,
    *,
    step: Int32[Array, ""],
    seed: int,
    training: bool,
) -> Walk:
    """Return the way of a microbatch through the model."""
    return Walk(model, placement, surroundings(batch, placement, step), seed, training)


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


def by_chunk(model: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return one pipeline rank's leaves, [chunks, 1, places, ...], by chunk and period.

    [chunks, periods of a stage, layers of a period, ...].
    """
    period = layer_plan(model).period
    return {
        name: leaf.reshape(len(leaf), -1, period, *leaf.shape[3:])
        if name.startswith("body.")
        else leaf
        for name, leaf in params.items()
    }


def _scan_body(
    way: Walk, stored: Tree, x: Float[Array, "B L D"]
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Scan the body, one period of the window pattern at a time."""
    plan = layer_plan(way.model)
    layers = jnp.array(plan.body, jnp.int32).reshape(-1, plan.period)
    # XLA takes the loop away from a scan of one period, and only a loop keeps the two computations
    # of a value apart.
    scanned = len(layers) > 1

    def one_period(x: Array, period: tuple[Tree, Array]) -> tuple[Array, RouterSums | None]:
        stored, layers = period
        sums = []
        for member, like in enumerate(plan.body[: plan.period]):
            take = take_member(member)
            x, layer_sums = way.block(
                stored, x, layers[member], like=like, take=take, scanned=scanned
            )
            sums.append(layer_sums)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *sums)

    x, sums = lax.scan(one_period, x, (stored, layers))
    return x, jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sums)


def enter(
    way: Walk, params: dict[str, Any], tokens: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], list[RouterSums | None]]:
    """Return the input of the body, and the sums of each leading block."""
    x, sums = way.embed(unit(params, "embedding"), tokens), []
    for i, layer in enumerate(layer_plan(way.model).leading):
        x, single = way.block(unit(params, f"leading.{i}"), x, layer, like=layer)
        sums.append(single)
    return x, sums


def forward(
    way: Walk, params: dict[str, Any], tokens: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Return the hidden state before the head's norm, and each routed layer's sums, stacked.

    `params` are as the placement stores them, and the body's lie `by_period`.
    """
    x, leading = enter(way, params, tokens)
    x, body = _scan_body(way, unit(params, "body"), x)
    trailing = []
    for i, layer in enumerate(layer_plan(way.model).trailing):
        x, single = way.block(unit(params, f"trailing.{i}"), x, layer, like=layer)
        trailing.append(single)
    return x, stack_sums(leading, body, trailing)


def stack_sums(
    leading: list[RouterSums | None],
    body: RouterSums | None,
    trailing: Sequence[RouterSums | None] = (),
) -> RouterSums | None:
    """Put the routed layers' sums in layer order along a leading dim."""
    if body is None:
        return None
    alone = [jax.tree.map(lambda v: v[None], sums) for sums in leading if sums is not None]
    after = [jax.tree.map(lambda v: v[None], sums) for sums in trailing]
    return jax.tree.map(lambda *values: jnp.concatenate(values), *alone, body, *after)


def head_units(model: ModelConfig, params: dict[str, Any]) -> tuple[Tree, ...]:
    """Return the units that the head reads, as they are stored."""
    head = unit(params, "head")
    return (head, {"weight": params["embedding.weight"]}) if model.tie_embeddings else (head,)


def head_input(
    model: ModelConfig,
    units: tuple[Tree, ...],
    hidden: Float[Array, "B L D"],
    placement: Placement,
) -> tuple[Float[Array, "B L D"], Float[Array, "D V"]]:
    """Return the normalised hidden state and the weight that makes logits of it."""
    weights, hidden = placement.read(units, hidden)
    head = nnx.merge(_graphs(model)["head"], weights[0])
    normed = head.norm(hidden)
    if head.weight is not None:
        return normed, head.weight[...]
    return normed, weights[1]["weight"].T


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
