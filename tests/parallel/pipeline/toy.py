"""A small pipelined model: embedding and a leading block, layers with experts, a head.

Its parts are functions of weights, accumulators and arrays, as the executor takes them. Without a
mesh axis for the experts they are also what one device does, differentiated by JAX alone.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from olmo_jax.arch.layers import PADDING_LAYER, stage_layout
from olmo_jax.mesh.axes import AXES
from olmo_jax.ops.varying import axes_of, vary_over
from olmo_jax.parallel.ddp import attach
from olmo_jax.parallel.pipeline.executor import Parts, pick, run

D, HIDDEN, EXPERTS, VOCAB = 6, 7, 4, 13
IGNORED = -100
NAMES = ("embedding", "hidden", "mixed", "gates", "gathered", "expert_hidden", "combined")
AUX = 0.3

KEEP = partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(*NAMES),
    prevent_cse=False,
)


class Data(NamedTuple):
    """What differs between microbatches; `scale` is real-valued, so that it can be poisoned."""

    tokens: jax.Array
    scale: jax.Array


def weights(num_layers, seed=0):
    """Return FP32 weights of a model: the body's leaves [num_layers, ...]."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return (draw.normal(size=shape) / np.sqrt(4 * shape[-2])).astype(np.float32)

    block = {"up": (D, HIDDEN), "down": (HIDDEN, D)}
    layer = block | {"router": (D, EXPERTS), "experts": (EXPERTS, D, D)}
    return Parts(
        {"table": normal(VOCAB, D) * 3} | {name: normal(*shape) for name, shape in block.items()},
        {name: normal(num_layers, *shape) for name, shape in layer.items()},
        {"head": normal(D, VOCAB)},
    )


def microbatches(count, rows, length, seed=1):
    draw = np.random.default_rng(seed)
    shape = (count, rows, length)
    tokens = draw.integers(0, VOCAB, shape).astype(np.int32)
    labels = draw.integers(0, VOCAB, shape).astype(np.int32)
    labels[draw.random(shape) < 0.2] = IGNORED
    return Data(tokens, draw.uniform(0.8, 1.1, shape).astype(np.float32)), labels


def mlp(w, x):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return x + checkpoint_name(jnp.tanh(hidden) @ w["down"], "mixed")


def mix(w, x, gates, axis):
    """Return the experts' outputs, weighted; along `axis` each rank has some of the experts."""
    if axis is not None:
        x = checkpoint_name(lax.all_gather(x, axis, axis=0, tiled=True), "gathered")
        gates = lax.all_gather(gates, axis, axis=0, tiled=True)
        local = len(w)
        gates = lax.dynamic_slice_in_dim(gates, lax.axis_index(axis) * local, local, 1)
    hidden = checkpoint_name(jnp.einsum("td,edf->etf", x, w), "expert_hidden")
    y = jnp.sum(jnp.tanh(hidden) * gates.T[:, :, None], axis=0)
    return y if axis is None else lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True)


def layer(axis, w, x, data):
    """Return a layer's output, its auxiliary loss, and how often each expert is the first."""
    x = mlp(w, x * data.scale[..., None])
    rows = x.reshape(-1, D)
    logits = checkpoint_name(rows @ w["router"], "gates")
    gates = jax.nn.softmax(logits)
    y = checkpoint_name(mix(w["experts"], rows, gates, axis), "combined")
    aux = AUX * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)
    counts = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=jnp.int32).sum(0)
    return x + y.reshape(x.shape), aux, counts


def tie(weights, accumulators):
    return weights if accumulators is None else jax.tree.map(attach, weights, accumulators)


def embed(w, data):
    # No lookup: its gradient would be a scatter with repeated indices.
    x = jax.nn.one_hot(data.tokens, VOCAB) @ w["table"]
    return mlp(w, checkpoint_name(x, "embedding")) * data.scale[..., None]


def first(w, accumulators, data):
    x = KEEP(lambda accumulators: embed(tie(w, accumulators), data))(accumulators)
    return x, jnp.zeros(()), {"tokens": jnp.int32(data.tokens.size)}


def last(w, accumulators, rows, labels):
    logits = rows @ tie(w, accumulators)["head"]
    taken = jnp.sum(jax.nn.one_hot(labels, VOCAB) * logits, axis=-1)
    counts = labels != IGNORED
    entropy = jnp.sum(jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - taken, 0.0))
    return entropy, {"loss": entropy, "loss_tokens": counts.sum(dtype=jnp.int32)}


def stage(w, numbers, axis, accumulators, x, data, chunk):
    """Run a chunk's layers; a padding layer passes its input on."""

    def one(carry, layer_of):
        x, share = carry
        number, accumulators, there = layer_of

        def inside(number, chunk, accumulators, x, data):
            return layer(axis, tie(pick(w, chunk, number), accumulators), x, data)

        y, aux, counts = KEEP(inside)(number, chunk, accumulators, x, data)
        share = share + jnp.where(there, aux, 0.0)
        carry = jnp.where(there, y, x), vary_over(share, tuple(sorted(axes_of(x))))
        return carry, jnp.where(there, counts, 0)

    size = numbers.shape[1]
    taken = vary_over(jnp.arange(size), AXES), accumulators, pick(numbers, chunk) != PADDING_LAYER
    share = vary_over(jnp.zeros(()), tuple(sorted(axes_of(x))))
    (x, share), counts = lax.scan(one, (x, share), taken)
    return x, share, {"counts": counts, "aux": share}


def objective(weights, data, labels):
    """Return what one device computes: the sum over all microbatches, and its parts."""

    def one(data, labels):
        x, _, _ = first(weights.first, None, data)

        def through(x, w):
            x, aux, counts = layer(None, w, x, data)
            return x, (aux, counts)

        x, (aux, counts) = lax.scan(through, x, weights.body)
        loss, _ = last(weights.last, None, x.reshape(-1, D), labels.reshape(-1))
        return loss, aux.sum(), counts

    loss, aux, counts = jax.vmap(one)(data, labels)
    return loss.sum() + aux.sum(), (loss.sum(), aux.sum(), counts.sum(0))


@cache
def reference(num_layers, count, rows, length):
    data, labels = microbatches(count, rows, length)
    differentiate = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (_, sums), gradients = differentiate(weights(num_layers), data, labels)
    return sums, gradients


BODY_SPECS = {
    "up": P(None, "pipeline"),
    "down": P(None, "pipeline"),
    "router": P(None, "pipeline"),
    "experts": P(None, "pipeline", None, "expert"),
}
BATCH = P(None, ("data", "fsdp", "expert"))


def _sum(tree, axes):
    return jax.tree.map(lambda leaf: lax.psum(leaf, axes), tree)


def program(schedule, mesh, num_layers):
    """Return a jitted function of (weights, data, labels) to sums and gradients, and its weights.

    The body's weights are laid out by stages, padding layers filled with ones.
    """
    layers = stage_layout(num_layers, schedule.ranks, schedule.chunks).layers
    axis = "expert" if mesh.shape["expert"] > 1 else None

    def local(w, data, labels):
        w = w._replace(body=jax.tree.map(lambda leaf: leaf[:, 0], w.body))
        w, data, labels = jax.tree.map(lambda leaf: vary_over(leaf, AXES), (w, data, labels))
        numbers = jnp.asarray(layers)[:, lax.axis_index("pipeline")]
        functions = Parts(
            partial(first, w.first), partial(stage, w.body, numbers, axis), partial(last, w.last)
        )
        accumulators = None if schedule.forward_only else jax.tree.map(jnp.zeros_like, w)
        gradients, sums = run(
            schedule,
            functions,
            accumulators=accumulators,
            data=data,
            labels=labels.reshape(len(labels), -1),
            ignored=IGNORED,
        )
        totals = (
            lax.psum(sums.last["loss"], AXES),
            lax.psum(sums.body["aux"].sum(), AXES),
            _sum(sums.body["counts"], ("data", "fsdp", "expert", "sequence"))[:, None],
        )
        numbers = lax.psum(sums.last["loss_tokens"], AXES), lax.psum(sums.first["tokens"], AXES)
        if gradients is None:
            return totals, numbers, ()
        replicas = ("data", "fsdp", "sequence")
        body = {
            name: _sum(leaf, replicas if name == "experts" else (*replicas, "expert"))[:, None]
            for name, leaf in gradients.body.items()
        }
        return (
            totals,
            numbers,
            Parts(_sum(gradients.first, AXES), body, _sum(gradients.last, AXES)),
        )

    specs = Parts(P(), BODY_SPECS, P())
    out = (P(), P(), P(None, "pipeline")), P(), () if schedule.forward_only else specs
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, BATCH, BATCH), out_specs=out)
    return jax.jit(step), by_stage(weights(num_layers), layers)


def by_stage(w, layers):
    def leaf(value):
        empty = np.ones((layers.size - len(value), *value.shape[1:]), value.dtype)
        return np.concatenate([value, empty]).reshape(*layers.shape, *value.shape[1:])

    return w._replace(body={name: leaf(value) for name, value in w.body.items()})


def layer_order(leaf, num_layers):
    """Return the layers of a leaf in order, and what the padding layers hold."""
    flat = np.asarray(leaf).reshape(-1, *leaf.shape[3:])
    return flat[:num_layers], flat[num_layers:]
