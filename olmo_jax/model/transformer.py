"""The whole model: embedding, blocks (the homogeneous ones scanned), head.

Parameters are one flat dict from dotted names to arrays. Inside, a unit is what is read at once:
the embedding, one block, or the head; `Execution.unshard` turns each, as stored, into its weights.
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

from olmo_jax.arch import parameters
from olmo_jax.arch.layers import StageLayout, is_routed, layer_groups, window_of
from olmo_jax.arch.parameters import STACKED, STAGED
from olmo_jax.config.records import ModelConfig
from olmo_jax.data.batch import Batch
from olmo_jax.errors import UserError
from olmo_jax.model.block import Block
from olmo_jax.model.execution import Execution, Tree
from olmo_jax.model.initialise import ExpertBias, Initialiser
from olmo_jax.model.moe import BlockInputs, RouterSums, block_inputs
from olmo_jax.model.norm import RMSNorm, optional_norm
from olmo_jax.ops.embedding import embed

Params = dict[str, Array]
"""Dotted name to array: `body.attention.q`, `leading.0.mlp.down`, `head.weight`."""


class Embedding(nnx.Module):
    """Token rows, scaled, then normalised if the config says so.

    Source: olmo_core 3.0.0, nn/ddp/model.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.model = model
        self.weight = make("weight")
        self.norm = optional_norm(make, "norm", eps=model.norm_eps)

    def __call__(self, tokens: Int32[Array, "B L"]) -> Float[Array, "B L D"]:
        x = embed(self.weight[...], tokens, jnp.dtype(self.model.dtype))
        x = checkpoint_name(x, "embedding")
        # In FP32: sqrt(d_model) itself would be rounded to the compute dtype.
        x = (x.astype(jnp.float32) * self.model.embedding_multiplier).astype(x.dtype)
        return x if self.norm is None else self.norm(x)


class Head(nnx.Module):
    """The last norm and, unless it is the embedding's, the weight of the logits."""

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.norm = RMSNorm(make.inside("norm"), eps=model.norm_eps)
        self.weight = make.optional("weight")


class Transformer(nnx.Module):
    """All leaves of the model, with values that depend on (seed, name, layer) alone.

    The body's are stacked by layer, or by chunk, stage and layer of a stage if `stages` says so.
    """

    def __init__(self, model: ModelConfig, key: Key[Array, ""], stages: StageLayout | None = None):
        groups, of_ends = layer_groups(model), Initialiser(key, model, parameters.ends(model))

        def make_block(layers: np.ndarray, dims: tuple[str, ...], *, routed: bool) -> Block:
            described = parameters.block(model, routed=routed)
            make = Initialiser(key, model, described, layers=layers, dims=dims)
            return Block(model, make, routed=routed)

        def single(layer: int) -> Block:
            return make_block(np.array(layer), (), routed=is_routed(model, layer))

        self.embedding = Embedding(model, of_ends.inside("embedding"))
        self.leading = nnx.List([single(layer) for layer in groups.leading])
        layers, dims = np.array(groups.body), (STACKED,)
        if stages is not None:
            layers, dims = stages.model_layers(groups), STAGED
        self.body = make_block(layers, dims, routed=is_routed(model, groups.body[0]))
        self.trailing = nnx.List([single(layer) for layer in groups.trailing])
        self.head = Head(model, of_ends.inside("head"))


def _flatten(tree: Tree) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}


def initialise(
    model: ModelConfig, seed: int, stages: StageLayout | None = None
) -> tuple[Params, Params]:
    """Return the FP32 (parameters, expert biases) of a run's first step.

    With `stages` its parameters are [chunks, ranks, layers of a stage, ...], each made where it
    lives.
    """
    whole, kinds = jax.random.key(seed), (nnx.Param, ExpertBias)
    _, trained, bias = nnx.split(Transformer(model, whole, stages), *kinds)
    if stages is not None:
        _, _, bias = nnx.split(Transformer(model, whole), *kinds)
    return _flatten(nnx.to_pure_dict(trained)), _flatten(nnx.to_pure_dict(bias))


@cache
def check_description(model: ModelConfig) -> None:
    """Compare the leaves that the modules make with those that the model's description has.

    Raises: ValueError that names a leaf which only one of the two has, or whose shape differs.
    """
    abstract = jax.eval_shape(lambda: initialise(model, 0))
    made = {name: leaf.shape for leaves in abstract for name, leaf in leaves.items()}
    described = {name: leaf.shape for name, leaf in parameters.leaves(model).items()}
    differing = sorted({name for name, _ in made.items() ^ described.items()})
    if differing:
        name = differing[0]
        raise ValueError(
            f"{name} is {made.get(name, 'no leaf')} in the modules and "
            f"{described.get(name, 'no leaf')} in the description ({len(differing)} leaves "
            "differ); olmo_jax/arch/parameters.py must describe what olmo_jax/model/ makes"
        )


@cache
def _graphs(model: ModelConfig) -> dict[str, Any]:
    """Return how each kind of unit is put together, without its values."""
    key = jax.random.key(0)
    of_ends = Initialiser(key, model, parameters.ends(model))

    def one_block(*, routed: bool) -> Block:
        described = parameters.block(model, routed=routed)
        return Block(model, Initialiser(key, model, described), routed=routed)

    units = {
        "embedding": lambda: Embedding(model, of_ends.inside("embedding")),
        "dense": lambda: one_block(routed=False),
        "routed": lambda: one_block(routed=True),
        "head": lambda: Head(model, of_ends.inside("head")),
    }
    if not model.num_routed_layers:
        del units["routed"]
    return {name: nnx.split(nnx.eval_shape(unit))[0] for name, unit in units.items()}


def check_leaves(model: ModelConfig, params: Mapping[str, Any]) -> None:
    """Refuse parameters that lack a leaf of the model, or have one that it has not.

    Raises: UserError that names the leaves: put together, they would be taken for one another.
    """
    wanted = parameters.leaves(model).keys()
    missing, extra = sorted(wanted - params.keys()), sorted(params.keys() - wanted)
    if missing or extra:
        raise UserError(
            f"parameters lack {missing or 'nothing'} and have {extra or 'nothing'} that the model "
            f"does not; it has {len(wanted)} leaves, expert biases included; give exactly those of "
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
class ForwardPass:
    """One microbatch on its way through the model; each method runs one unit of it."""

    model: ModelConfig
    execution: Execution
    inputs: BlockInputs

    def embed(self, stored: Tree, tokens: Int32[Array, "B L"]) -> Float[Array, "B L D"]:
        """Return the rows of the embedding."""

        def unit(stored: Tree, tokens: Array) -> Array:
            weights, tokens = self.execution.unshard(stored, tokens)
            return nnx.merge(_graphs(self.model)["embedding"], weights)(tokens)

        return self.execution.rematerialize(unit)(stored, tokens)

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

        `take` gets its leaves out of those of a loop. Here, and not before: what backward saves is
        then what is looped over, not a copy.
        """
        model = self.model
        kind = "routed" if is_routed(model, like) else "dense"

        def unit(
            stored: Tree, x: Array, inputs: BlockInputs, layer: Array
        ) -> tuple[Array, RouterSums | None]:
            # Inside of what is rematerialized: the slice and the gather of a weight are not saved,
            # and the backward repeats them on the shards.
            taken = stored if take is None else take(stored)
            weights, x = self.execution.unshard(taken, x)
            block = nnx.merge(_graphs(model)[kind], weights)
            return block(x, inputs, self.execution, layer, window=window_of(model, like))

        unit_of_loop = self.execution.rematerialize(unit, scanned=scanned)
        return unit_of_loop(stored, x, self.inputs, jnp.asarray(layer, jnp.int32))


def forward_pass(
    model: ModelConfig, batch: Batch, execution: Execution, step: Int32[Array, ""]
) -> ForwardPass:
    """Return the way of a microbatch through the model."""
    return ForwardPass(model, execution, block_inputs(batch, execution, step))


def by_period(model: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves with the body's stacked as [periods, layers of a period, ...].

    So they are scanned, one period of the window pattern at a time; and so an accumulator must lie
    for its layers' gradients to be added in place.
    """
    groups = layer_groups(model)
    shape = (len(groups.body) // groups.period, groups.period)
    return {
        name: leaf.reshape(*shape, *leaf.shape[1:]) if name.startswith("body.") else leaf
        for name, leaf in params.items()
    }


def by_chunk(model: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return one pipeline rank's leaves, [chunks, 1, layers of a stage, ...], by chunk and period.

    [chunks, periods of a stage, layers of a period, ...].
    """
    period = layer_groups(model).period
    return {
        name: leaf.reshape(len(leaf), -1, period, *leaf.shape[3:])
        if name.startswith("body.")
        else leaf
        for name, leaf in params.items()
    }


def _scan_body(
    run: ForwardPass, stored: Tree, x: Float[Array, "B L D"]
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Scan the body, one period of the window pattern at a time."""
    groups = layer_groups(run.model)
    # A window is static, so layers of one scan must agree in it. They do position by position of a
    # period, and the body of the scan is one whole period: P layers, each with its own window.
    layers = jnp.array(groups.body, jnp.int32).reshape(-1, groups.period)
    # XLA takes the loop away from a scan of one period, and only a loop keeps the two computations
    # of a value apart.
    scanned = len(layers) > 1

    def one_period(x: Array, period: tuple[Tree, Array]) -> tuple[Array, RouterSums | None]:
        stored, layers = period
        sums = []
        for member, like in enumerate(groups.body[: groups.period]):
            take = take_member(member)
            x, layer_sums = run.block(
                stored, x, layers[member], like=like, take=take, scanned=scanned
            )
            sums.append(layer_sums)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *sums)

    x, sums = lax.scan(one_period, x, (stored, layers))
    return x, jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sums)


def run_leading(
    run: ForwardPass, params: dict[str, Any], tokens: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], list[RouterSums | None]]:
    """Return the input of the body, and the sums of each leading block."""
    x, sums = run.embed(unit(params, "embedding"), tokens), []
    for i, layer in enumerate(layer_groups(run.model).leading):
        x, single = run.block(unit(params, f"leading.{i}"), x, layer, like=layer)
        sums.append(single)
    return x, sums


def forward(
    run: ForwardPass, params: dict[str, Any], tokens: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], RouterSums | None]:
    """Return the hidden state before the head's norm, and each routed layer's sums, stacked.

    `params` are as the execution stores them, and the body's lie `by_period`.
    """
    x, leading = run_leading(run, params, tokens)
    x, body = _scan_body(run, unit(params, "body"), x)
    trailing = []
    for i, layer in enumerate(layer_groups(run.model).trailing):
        x, single = run.block(unit(params, f"trailing.{i}"), x, layer, like=layer)
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
    execution: Execution,
) -> tuple[Float[Array, "B L D"], Float[Array, "D V"]]:
    """Return the normalised hidden state and the weight that makes logits of it."""
    weights, hidden = execution.unshard(units, hidden)
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
    # The first `num_dense_layers` layers have no router, so layer l is row l - num_dense_layers.
    groups = layer_groups(model)
    first = {"leading": 0, "body": groups.body[0], "trailing": groups.body[-1] + 1}
    rows: list[int | slice] = []
    for name in names:
        group, number = name.split(".")[:2]
        start = first[group] - model.num_dense_layers
        if group == "body":
            rows.append(slice(start, start + len(groups.body)))
        else:
            rows.append(start + int(number))
    return rows
