"""The router against the reference's values, and the laws that its weights and choices obey."""

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from olmo_jax.arch.parameters import block
from olmo_jax.config.records import InitConfig, ModelConfig, RouterConfig
from olmo_jax.model.balance import bias_update, expert_counts
from olmo_jax.model.initialise import ExpertBias, Initialiser
from olmo_jax.model.router import Router, Routing, forced_experts, jitter, route
from tests.model.losses import balance_loss, z_loss

# The 13 configs were run through olmo_core 3.0.0, nn/moe/v2/router.py, on a CPU in FP32.
GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "router_cases.json").read_text())
BALANCE_WEIGHT, Z_WEIGHT = 0.02, 0.003
DIVISORS = {"n": None, "d": 117.0}
"""Each case was run with the default divisor, all 30 tokens, and with a given one."""

_KEYS = {
    "gating_function": "gating",
    "bias": "bias",
    "bias_gamma": "bias_gamma",
    "normalize_expert_weights": "normalize",
    "restore_weight_scale": "restore_weight_scale",
    "score_correction_bias": "score_correction_bias",
    "n_group": "num_groups",
    "topk_group": "top_groups",
    "expert_weight_scale": "expert_weight_scale",
    "sigmoid_stability_epsilon": "sigmoid_epsilon",
    "original_top_k": "original_top_k",
}


@cache
def load() -> dict[str, np.ndarray]:
    """Return the inputs and the reference's values."""
    with np.load(GOLDEN / "router.npz") as arrays:
        return dict(arrays)


def case_config(number: int) -> tuple[RouterConfig, int]:
    """Return a case's config and top_k; absent keys have the reference's defaults, not ours."""
    case = CASES[number]
    scope = "instance" if case.get("lb_loss_granularity") == "instance" else "microbatch"
    unset = {"normalize": None, "restore_weight_scale": False, "balance_scope": scope}
    given = {_KEYS[key]: value for key, value in case.items() if key in _KEYS}
    return RouterConfig(**(unset | given)), case.get("top_k", 4)


class Measured(NamedTuple):
    routing: Routing
    counts: jax.Array
    losses: dict[str, tuple[jax.Array, jax.Array]]
    gradients: dict[str, jax.Array]


@cache
def measured(number: int) -> Measured:
    """Route the stored tokens by a case's config; balance and z-loss for each divisor."""
    config, top_k = case_config(number)
    arrays = {name: jnp.asarray(load()[name]) for name in ("x", "w", "bias", "score_bias")}
    has_score_bias = config.bias_gamma is not None or config.score_correction_bias
    real = jnp.ones(arrays["x"].shape[:2], bool)

    def routed(weight):
        return route(
            arrays["x"],
            weight,
            bias=arrays["bias"] if config.bias else None,
            score_bias=arrays["score_bias"] if has_score_bias else None,
            config=config,
            top_k=top_k,
        )

    def losses(weight, divisor):
        found = routed(weight)
        balance = balance_loss(found.scores, found.experts, real, config=config, divisor=divisor)
        z = z_loss(found.logits, real, divisor=divisor)
        return BALANCE_WEIGHT * balance + Z_WEIGHT * z, (balance, z)

    @jax.jit
    def measure(weight):
        found = routed(weight)
        grad = jax.grad(losses, has_aux=True)
        gradients = {name: grad(weight, divisor) for name, divisor in DIVISORS.items()}
        return Measured(
            found,
            expert_counts(found.experts, real, weight.shape[0]).sum(0),
            {name: parts for name, (_, parts) in gradients.items()},
            {name: gradient for name, (gradient, _) in gradients.items()},
        )

    return measure(arrays["w"])


PLAIN = RouterConfig(normalize=None, restore_weight_scale=False)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def tokens_and_weight(batch=2, length=6, width=8, num_experts=8):
    return normal(batch, length, width), normal(num_experts, width, seed=1)


jitted_route = jax.jit(route, static_argnames=("config", "top_k"))


def plain_route(x, weight, config=PLAIN, top_k=3, **given):
    biases = {"bias": None, "score_bias": None}
    return jitted_route(x, weight, **(biases | given), config=config, top_k=top_k)


def in_expert_order(experts, weights):
    order = np.argsort(experts, -1)
    pair = (np.asarray(experts), np.asarray(weights))
    return [np.take_along_axis(values, order, -1) for values in pair]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_weights_experts_and_counts_are_the_reference_s(number):
    found = measured(number)
    experts, weights = in_expert_order(found.routing.experts, found.routing.weights)
    for divisor in DIVISORS:
        want = {key: load()[f"c{number}_{divisor}_{key}"] for key in ("idx", "weights", "counts")}
        wanted_experts, wanted_weights = in_expert_order(want["idx"], want["weights"])
        np.testing.assert_array_equal(experts, wanted_experts)
        # To 1e-6 of the largest: restored scales make weights of up to 5.
        atol = 1e-6 * max(1.0, wanted_weights.max())
        np.testing.assert_allclose(weights, wanted_weights, rtol=0, atol=atol)
        np.testing.assert_array_equal(found.counts, want["counts"])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_losses_and_their_gradient_are_the_reference_s(number):
    found = measured(number)
    for divisor in DIVISORS:
        want = {key: load()[f"c{number}_{divisor}_{key}"] for key in ("lb", "z", "aux_grad_w")}
        balance, z = found.losses[divisor]
        np.testing.assert_allclose(balance, want["lb"], rtol=1e-6)
        np.testing.assert_allclose(z, want["z"], rtol=1e-6)
        largest = np.abs(want["aux_grad_w"]).max()
        gradient = found.gradients[divisor]
        np.testing.assert_allclose(gradient, want["aux_grad_w"], rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if "bias_gamma" in case])
def test_bias_after_an_update_is_the_reference_s(number):
    gamma = CASES[number]["bias_gamma"]
    found = bias_update(jnp.asarray(load()["score_bias"]), measured(number).counts, gamma)
    for divisor in DIVISORS:
        np.testing.assert_allclose(found, load()[f"c{number}_{divisor}_bias_after"], atol=1e-7)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0])
def test_normalised_weights_have_norm_one(norm):
    config = PLAIN.model_copy(update={"normalize": norm})
    weights = plain_route(*tokens_and_weight(), config).weights
    np.testing.assert_allclose((weights**norm).sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"restore_weight_scale": True}, 3.0),
        ({"expert_weight_scale": 2.5}, 2.5),
        ({"original_top_k": 12}, 2.0),
        ({"original_top_k": 3}, 1.0),
    ],
)
def test_scales_multiply_the_weights(change, factor):
    x, weight = tokens_and_weight()
    plain = plain_route(x, weight)
    scaled = plain_route(x, weight, PLAIN.model_copy(update=change))
    np.testing.assert_allclose(scaled.weights, factor * plain.weights, rtol=1e-6)
    np.testing.assert_array_equal(scaled.experts, plain.experts)


def test_sigmoid_epsilon_is_in_the_weight():
    config = PLAIN.model_copy(update={"gating": "sigmoid", "sigmoid_epsilon": 0.25})
    found = plain_route(*tokens_and_weight(), config)
    assert found.weights.min() > 0.25
    np.testing.assert_allclose(found.scores, jax.nn.sigmoid(found.logits) + 0.25, rtol=1e-6)


def test_a_router_bias_of_zero_is_no_bias():
    x, weight = tokens_and_weight()
    for name in ("bias", "score_bias"):
        with_zeros = plain_route(x, weight, **{name: jnp.zeros(8)})
        chex.assert_trees_all_equal(with_zeros, plain_route(x, weight))


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_score_bias_steers_the_choice_and_nothing_else(gating):
    x, weight = tokens_and_weight()
    config = PLAIN.model_copy(update={"gating": gating})
    steered = plain_route(x, weight, config, score_bias=100.0 * (jnp.arange(8) == 5))
    assert (steered.experts[..., 0] == 5).all()
    np.testing.assert_array_equal(steered.scores, plain_route(x, weight, config).scores)
    if gating == "topk_softmax":
        chosen = jnp.take_along_axis(steered.logits, steered.experts, -1)
        np.testing.assert_allclose(steered.weights, jax.nn.softmax(chosen), rtol=1e-6)
    else:
        chosen = jnp.take_along_axis(steered.scores, steered.experts, -1)
        np.testing.assert_array_equal(steered.weights, chosen)


def test_no_gradient_reaches_the_score_bias():
    x, weight = tokens_and_weight()
    grad = jax.grad(lambda b: plain_route(x, weight, score_bias=b).weights.sum())(jnp.ones(8))
    np.testing.assert_array_equal(grad, jnp.zeros(8))


def test_grouped_selection_stays_within_the_best_groups():
    x, weight = tokens_and_weight(num_experts=12)
    config = PLAIN.model_copy(update={"num_groups": 4, "top_groups": 2})
    found = plain_route(x, weight, config, top_k=4)
    groups = np.sort(np.asarray(found.scores).reshape(2, 6, 4, 3), -1)
    best = np.argsort(-groups[..., -2:].sum(-1), -1)[..., :2]
    assert (np.asarray(found.experts)[..., None] // 3 == best[..., None, :]).any(-1).all()


def test_one_expert_per_group_scores_by_that_expert():
    x, weight = tokens_and_weight()
    config = PLAIN.model_copy(update={"num_groups": 8, "top_groups": 3})
    found, plain = plain_route(x, weight, config), plain_route(x, weight)
    np.testing.assert_array_equal(found.experts, plain.experts)


def equations(jaxpr, prefix):
    """Yield the equations of the primitives of that prefix, those of inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(prefix):
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, prefix)


def test_bfloat16_tokens_are_routed_in_float32():
    x, weight = tokens_and_weight()
    rounded = x.astype(jnp.bfloat16)
    found = plain_route(rounded, weight)
    wanted = plain_route(rounded.astype(jnp.float32), weight)
    assert found.weights.dtype == jnp.float32
    chex.assert_trees_all_equal(found, wanted)
    products = list(equations(jax.make_jaxpr(plain_route)(rounded, weight).jaxpr, "dot_general"))
    assert [eqn.params["precision"] for eqn in products] == [(lax.Precision.HIGHEST,) * 2]


def test_weights_gradient_is_the_dense_formula_s():
    x, weight = tokens_and_weight()
    config = RouterConfig(normalize=2.0)
    cotangent = normal(2, 6, 3, seed=2)

    def dense(weight):
        scores = jax.nn.softmax(x @ weight.T)
        chosen = jnp.take_along_axis(scores, plain_route(x, weight, config).experts, -1)
        return 3 * jnp.sum(cotangent * chosen / jnp.sqrt((chosen**2).sum(-1, keepdims=True)))

    found = jax.grad(lambda w: jnp.sum(cotangent * plain_route(x, w, config).weights))(weight)
    wanted = jax.jit(jax.grad(dense))(weight)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax"])
def test_gradients_scatter_to_distinct_places_only(gating):
    x, weight = tokens_and_weight()
    config = RouterConfig(gating=gating)
    loss = jax.grad(lambda w: jnp.sum(plain_route(x, w, config).weights ** 2))
    found = list(equations(jax.make_jaxpr(loss)(weight).jaxpr, "scatter"))
    assert found
    assert all(eqn.params["unique_indices"] for eqn in found)


@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_padding_changes_no_other_token_and_no_gradient(poison, gating):
    x, weight = tokens_and_weight()
    real = jnp.arange(12).reshape(2, 6) % 5 != 2
    config = RouterConfig(gating=gating)

    def value(x, weight):
        found = plain_route(x, weight, config, padding_mask=real)
        return jnp.sum(jnp.where(real[..., None], found.weights, 0) ** 2), found

    grad = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
    (_, clean), clean_grads = grad(x, weight)
    (_, dirty), dirty_grads = grad(jnp.where(real[..., None], x, poison), weight)
    chex.assert_trees_all_equal((dirty, dirty_grads), (clean, clean_grads))
    assert not dirty_grads[0][~real].any()


def test_forced_weights_come_from_the_router():
    x, weight = tokens_and_weight()
    experts = jnp.broadcast_to(jnp.array([6, 1, 3], jnp.int32), (2, 6, 3))
    for gating in ("softmax", "topk_softmax"):
        config = PLAIN.model_copy(update={"gating": gating})
        found = plain_route(x, weight, config, selection=experts)
        chosen = jnp.take_along_axis(found.logits, experts, -1)
        whole = chosen if gating == "topk_softmax" else found.logits
        wanted = jnp.exp(chosen - jax.nn.logsumexp(whole, -1, keepdims=True))
        np.testing.assert_array_equal(found.experts, experts)
        np.testing.assert_allclose(found.weights, wanted, rtol=1e-5)


jitted_forced = jax.jit(
    forced_experts, static_argnames=("assignment", "sequence_length", "num_experts", "top_k")
)


def forced(assignment, *, seed=0, step=1, layer=2, rows=range(4), positions=range(16), **given):
    sizes = {"sequence_length": 16, "num_experts": 8, "top_k": 3} | given
    place = (jnp.array(rows, jnp.int32), jnp.array(positions, jnp.int32))
    return np.asarray(jitted_forced(assignment, seed, step, layer, *place, **sizes))


@pytest.mark.parametrize("assignment", ["random", "uniform"])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_forced_experts_are_distinct_and_in_range(assignment, top_k):
    experts = np.sort(forced(assignment, top_k=top_k), -1)
    assert experts.shape == (4, 16, top_k)
    assert (np.diff(experts, axis=-1) > 0).all()
    assert experts.min() >= 0
    assert experts.max() < 8


@pytest.mark.parametrize("assignment", ["random", "uniform"])
def test_forced_experts_are_the_same_for_any_slice_of_the_batch(assignment):
    whole = forced(assignment)
    part = forced(assignment, rows=[3, 1], positions=range(4, 12))
    np.testing.assert_array_equal(part, whole[[3, 1], 4:12])


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 2}, {"layer": 3}])
def test_random_experts_change_with_the_seed_the_step_and_the_layer(change):
    assert (forced("random") != forced("random", **change)).any(-1).mean() > 0.5


def test_random_experts_use_all_experts_alike():
    experts = forced("random", rows=range(64), positions=range(64), sequence_length=64)
    share = np.bincount(experts.ravel(), minlength=8) / experts.size
    # Four standard deviations of a share of 12,288 draws.
    np.testing.assert_allclose(share, 1 / 8, atol=4 * math.sqrt(1 / 8 * 7 / 8 / experts.size))


def test_uniform_experts_count_through_the_tokens():
    token = np.arange(4)[:, None, None] * 16 + np.arange(16)[:, None]
    np.testing.assert_array_equal(forced("uniform"), (token * 3 + np.arange(3)) % 8)


def test_uniform_experts_of_a_long_run_do_not_overflow():
    rows, last = 2**20, 2**20 - 1
    found = forced(
        "uniform", rows=[last], positions=[8191], sequence_length=8192, num_experts=7, top_k=4
    )
    assert rows * 8192 * 4 > 2**31
    np.testing.assert_array_equal(
        found[0, 0], [((last * 8192 + 8191) * 4 + slot) % 7 for slot in range(4)]
    )


def jittered(x, eps=0.25, seed=0, step=1, layer=2, rows=(0, 1), positions=range(64)):
    jitted = jax.jit(jitter, static_argnames="eps")
    return jitted(x, eps, seed, step, layer, jnp.array(rows), jnp.array(positions))


def test_jitter_stays_within_eps_and_is_centred():
    factors = np.asarray(jittered(jnp.ones((2, 64, 64))))
    assert factors.min() >= 0.75
    assert factors.max() <= 1.25
    # Four standard deviations of the mean of 8,192 uniform draws.
    assert abs(factors.mean() - 1) < 4 * 0.5 / math.sqrt(12 * factors.size)
    assert np.unique(factors).size > 0.99 * factors.size


def test_jitter_keeps_the_dtype_and_follows_the_token():
    ones = jnp.ones((2, 64, 8), jnp.bfloat16)
    whole = jittered(ones)
    part = jittered(ones[:1, 8:16], rows=(1,), positions=range(8, 16))
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_array_equal(part[0], whole[1, 8:16])
    for change in ({"seed": 1}, {"step": 2}, {"layer": 3}):
        assert (jittered(ones, **change) != whole).any()


def small_model(**router):
    sizes = {"d_model": 32, "num_experts": 64, "top_k": 3}
    return ModelConfig(**sizes, router=RouterConfig(**router))


def make_router(model):
    make = Initialiser(jax.random.key(0), model, block(model, routed=True), layers=np.array(1))
    return Router(model, make.inside("moe").inside("router"))


def test_leaves_are_those_that_the_config_asks_for():
    plain = nnx.to_pure_dict(nnx.state(make_router(small_model())))
    assert {name: leaf.shape for name, leaf in plain.items()} == {"weight": (64, 32)}
    model = small_model(bias=True, bias_gamma=1e-3)
    full = nnx.state(make_router(model))
    assert {name: leaf.shape for name, leaf in nnx.to_pure_dict(full).items()} == {
        "weight": (64, 32),
        "bias": (64,),
        "score_bias": (64,),
    }
    assert isinstance(full["score_bias"], ExpertBias)
    assert not isinstance(full["score_bias"], nnx.Param)
    assert make_router(small_model(score_correction_bias=True)).score_bias is not None


def test_fan_in_initialisation_reads_the_model_width():
    model = small_model().model_copy(update={"init": InitConfig(method="fan_in")})
    std = float(jnp.std(make_router(model).weight[...]))
    # Sigma is 32^-0.5; the truncation at three sigma takes 1.3 % off, sampling 2,048 values 1.6 %.
    assert std == pytest.approx(32**-0.5, rel=0.06)


def test_the_module_routes_by_its_leaves():
    model = small_model(bias=True, bias_gamma=1e-3, gating="sigmoid")
    router = make_router(model)
    x, _ = tokens_and_weight(width=32)
    assert router.bias is not None
    assert router.score_bias is not None
    router.bias[...] = jnp.linspace(-1, 1, 64)
    router.score_bias[...] = jnp.linspace(1, -1, 64)
    wanted = route(
        x,
        router.weight[...],
        bias=jnp.linspace(-1, 1, 64),
        score_bias=jnp.linspace(1, -1, 64),
        config=model.router,
        top_k=3,
    )
    chex.assert_trees_all_equal(router(x, jnp.ones((2, 6), bool)), wanted)


def test_shards_route_their_tokens_as_the_whole_batch_is_routed():
    x, weight = tokens_and_weight(batch=4)
    config = RouterConfig(gating="sigmoid", num_groups=4, top_groups=2, jitter_eps=0.1)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"))
    rows, positions = jnp.arange(4), jnp.arange(6)

    def local(x, rows, positions, weight):
        x = jitter(x, 0.1, 3, 1, 2, rows, positions)
        real = jnp.ones(x.shape[:2], bool)
        found = plain_route(x, weight, config, score_bias=jnp.zeros(8), padding_mask=real)
        return found, expert_counts(found.experts, real, 8)[:, None]

    tokens = PartitionSpec("data", "sequence")
    specs = (tokens, PartitionSpec("data"), PartitionSpec("sequence"), PartitionSpec())
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=True)
    found, counts = jax.jit(sharded)(x, rows, positions, weight)
    wanted, wanted_counts = jax.jit(local)(x, rows, positions, weight)
    np.testing.assert_array_equal(found.experts, wanted.experts)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-5)
    np.testing.assert_array_equal(counts.sum(1), wanted_counts[:, 0])
