"""Model FLOPs: the published numbers, and a count on a step written out plainly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.arch.flops import attended_pairs, components, flops_per_token, model_flops
from olmo_jax.arch.layers import is_routed, layer_groups, window_of
from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import ModelConfig, WindowConfig
from olmo_jax.inspect.jaxpr import matmul_flops


@pytest.mark.parametrize(
    ("name", "gflops"),
    [
        ("Tiny-64E", "9.90"),
        ("Small-64E", "29.05"),
        ("Medium-64E", "50.23"),
        ("Medium-96E", "50.25"),
        ("Medium-128E", "50.28"),
        ("Large-128E", "100.2"),
        ("Ultra-128E", "371.8"),
        ("Ultra-256E", "372.1"),
        ("Bench-64E", "18.18"),
    ],
)
def test_recipes_cost_the_published_flops_per_token(recipes, name, gflops):
    digits = len(gflops.split(".")[1])
    assert f"{flops_per_token(recipes[name], 8192) / 1e9:.{digits}f}" == gflops


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
def test_attended_pairs_are_the_true_entries_of_the_mask(window):
    query, key = np.indices((8, 8))
    mask = (key <= query) & (query - key < (window or 8))
    assert attended_pairs(8, window) == mask.sum()


def weights_of(params, model, layer):
    """Return the leaves of one layer, by their names in the block."""
    plan = layer_groups(model)
    group = next(
        group for group in ("leading", "body", "trailing") if layer in getattr(plan, group)
    )
    index = getattr(plan, group).index(layer)
    prefix = "body." if group == "body" else f"{group}.{index}."
    leaves = {name: leaf for name, leaf in params.items() if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): leaf[index] if group == "body" else leaf
        for name, leaf in leaves.items()
    }


def attend(model, window, q, k, v):
    """Multiply each query by just the keys and values that it may see."""
    rows, group = [], model.num_heads // model.num_kv_heads
    for i in range(q.shape[0]):
        seen = slice(max(0, i + 1 - (window or model.vocab_size)), i + 1)
        keys, values = (jnp.repeat(x[seen], group, axis=1) for x in (k, v))
        shares = jax.nn.softmax(jnp.einsum("nh,lnh->nl", q[i], keys))
        rows.append(jnp.einsum("nl,lnh->nh", shares, values))
    return jnp.stack(rows)


def gated(x, up_gate, down):
    up, gate = jnp.split(x @ up_gate, 2, axis=-1)
    return (up * jax.nn.silu(gate)) @ down


def routed(model, w, x):
    """Pass token t through experts t, t + 1, ...: one product per expert over its own rows."""
    shares = jax.nn.softmax(x @ w["moe.router.weight"].T)
    out = gated(x, w["moe.shared.up_gate"], w["moe.shared.down"]) if model.shared_hidden else 0.0
    for expert in range(model.num_experts):
        offsets = (expert - np.arange(x.shape[0])) % model.num_experts
        rows = np.flatnonzero(offsets < model.top_k)
        y = gated(x[rows], w["moe.experts.up_gate"][expert], w["moe.experts.down"][expert])
        out += jnp.zeros_like(x).at[rows].set(y * shares[rows, expert, None])
    return out


def plain_loss(params, tokens, model):
    """Return some loss of one sequence: every product of the model, one by one."""
    x = params["embedding.weight"][tokens]
    for layer in range(model.num_layers):
        w = weights_of(params, model, layer)
        q, k, v = (jnp.einsum("ld,dnh->lnh", x, w[f"attention.{name}"]) for name in "qkv")
        mixed = attend(model, window_of(model, layer), q, k, v)
        if model.attention_gate == "headwise":
            mixed *= jax.nn.sigmoid(x @ w["attention.gate"])[..., None]
        if model.attention_gate == "elementwise":
            mixed *= jax.nn.sigmoid(jnp.einsum("ld,dnh->lnh", x, w["attention.gate"]))
        x += jnp.einsum("lnh,nhd->ld", mixed, w["attention.out"])
        if is_routed(model, layer):
            x += routed(model, w, x)
        else:
            x += gated(x, w["mlp.up_gate"], w["mlp.down"])
    head = params["embedding.weight"].T if model.tie_embeddings else params["head.weight"]
    return jax.nn.logsumexp(x @ head)


SMALL = ModelConfig(
    num_layers=3,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    expert_hidden=12,
    shared_hidden=20,
    dense_hidden=44,
    vocab_size=64,
)
CHANGES = {
    "plain": {},
    "windows": {"num_layers": 5, "windows": WindowConfig(pattern=(3, -1))},
    "elementwise gate": {"attention_gate": "elementwise", "shared_hidden": 0},
    "headwise gate, tied": {"attention_gate": "headwise", "tie_embeddings": True},
    "all dense": {"num_dense_layers": 3, "num_experts": 0, "top_k": 0},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
def test_model_flops_are_those_of_a_step_written_out_plainly(changes):
    model, length = SMALL.model_copy(update=changes), 7
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for name, leaf in parameters(model).items()
    }
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    forward = jax.make_jaxpr(lambda *args: plain_loss(*args, model))(params, tokens)
    step = jax.make_jaxpr(jax.grad(lambda *args: plain_loss(*args, model)))(params, tokens)
    parts = model_flops(model, length).values()
    assert matmul_flops(forward) == sum(part.forward for part in parts)
    assert matmul_flops(step) == sum(part.total for part in parts)
    assert matmul_flops(step) == flops_per_token(model, length) * length


def test_a_program_that_multiplies_more_is_counted_with_the_same_formulas():
    length = 7
    wasteful = components(
        SMALL,
        tokens=length,
        pairs=lambda window: SMALL.num_heads * length * length,
        rows=length * SMALL.num_experts,
    )
    needed = model_flops(SMALL, length)
    ratios = {kind: wasteful[kind].total / needed[kind].total for kind in needed}
    more = {"attention_scores": 49 / 28, "routed_experts": 2.0}
    assert ratios == {kind: more.get(kind, 1.0) for kind in needed}
