"""AdamW against its textbook in NumPy, written independently of optax, and to the bit."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from olmo_jax.config.records import OptimConfig
from olmo_jax.optim import skip
from olmo_jax.optim.optimizer import optimizer, update

DECAY = {"matrix": True, "gain": False}


def gradients(step):
    """Return gradients of sizes that differ from step to step; step 0 is the weights."""
    random = np.random.default_rng(step)
    scale = 10.0 ** (step % 5 - 2)
    return {
        "matrix": (scale * random.normal(size=(5, 3))).astype(np.float32),
        "gain": random.normal(size=4).astype(np.float32),
    }


def textbook(weight, m, v, count, grad, *, lr, betas, eps, weight_decay):
    """Return one step in FP64."""
    weight = weight * (1 - lr * weight_decay)
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    scale = np.sqrt(v) / np.sqrt(1 - betas[1] ** (count + 1)) + eps
    return weight - lr / (1 - betas[0] ** (count + 1)) * m / scale, m, v


def reference(taken, optim):
    weights = {name: np.float64(value) for name, value in gradients(0).items()}
    moments = {name: (0.0 * value, 0.0 * value) for name, value in weights.items()}
    for count, step in enumerate(taken):
        for name, grad in gradients(step).items():
            wd = optim.weight_decay * DECAY[name]
            arguments = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": wd}
            weights[name], *moments[name] = textbook(
                weights[name], *moments[name], count, np.float64(grad), **arguments
            )
    return weights, moments


def adamw(grads, opt_state, main, *, lr, optim):
    decays = {"weight_decay": optim.weight_decay, "decay": DECAY}
    return update(optimizer(optim), grads, opt_state, main, lr=jnp.float32(lr), **decays)


@partial(jax.jit, static_argnames="optim")
def step_of(grads, opt_state, main, lr, take, *, optim):
    new = adamw(grads, opt_state, main, lr=lr, optim=optim)
    return skip.keep(take, new, (main, opt_state))


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skipped", [None, 3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.7, 0.95)])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("lr", [0.0, 1e-3, 5e-4])
def test_five_steps_equal_the_textbook_and_a_skipped_one_leaves_no_trace(
    lr, weight_decay, betas, skipped
):
    optim = OptimConfig(lr=lr, weight_decay=weight_decay, betas=betas)
    static = OptimConfig(weight_decay=weight_decay, betas=betas)
    main = jax.tree.map(jnp.asarray, gradients(0))
    opt_state = optimizer(optim).init(main)
    for step in range(1, 6):
        main, opt_state = step_of(
            gradients(step), opt_state, main, jnp.float32(lr), step != skipped, optim=static
        )
    taken = [step for step in range(1, 6) if step != skipped]
    weights, expected = reference(taken, optim)
    assert opt_state.count == len(taken)
    for name, weight in weights.items():
        close(main[name], weight)
        close(opt_state.mu[name], expected[name][0])
        close(opt_state.nu[name], expected[name][1])


def test_decay_moves_only_the_weights_of_the_mask():
    main = {"matrix": jnp.ones((2, 2)), "gain": jnp.ones(2)}
    optim = OptimConfig(weight_decay=0.1)
    zeros = jax.tree.map(jnp.zeros_like, main)
    main, _ = adamw(zeros, optimizer(optim).init(main), main, lr=0.5, optim=optim)
    np.testing.assert_allclose(main["matrix"], 0.95, rtol=1e-7)
    np.testing.assert_array_equal(main["gain"], 1.0)


def test_eps_stands_outside_the_corrected_root():
    """Of a first gradient g the step is lr * g / (|g| + eps), whatever the betas."""
    main = {"matrix": jnp.zeros((1, 1)), "gain": jnp.zeros(1)}
    optim = OptimConfig(eps=1e-3, weight_decay=0.0)
    grads = jax.tree.map(lambda x: x + 1e-3, main)
    main, _ = adamw(grads, optimizer(optim).init(main), main, lr=1.0, optim=optim)
    np.testing.assert_allclose(main["gain"], -0.5, rtol=1e-5)


def test_weights_and_moments_are_fp32_and_the_count_is_an_integer():
    main = jax.tree.map(jnp.asarray, gradients(0))
    optim = OptimConfig()
    main, opt_state = adamw(main, optimizer(optim).init(main), main, lr=1.0, optim=optim)
    assert opt_state.count.dtype == jnp.int32
    leaves = jax.tree.leaves((main, opt_state.mu, opt_state.nu))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_the_weight_is_shrunk_and_then_moved_each_rounded_once():
    """To the bit, so that a run resumes as it would have gone on: no sum of updates is formed."""
    main, grads = jax.tree.map(jnp.asarray, (gradients(0), gradients(1)))
    optim, lr = OptimConfig(weight_decay=0.1), np.float32(3e-3)
    adam = optimizer(optim)
    found, _ = adamw(grads, adam.init(main), main, lr=lr, optim=optim)
    direction, _ = adam.update(grads, adam.init(main))
    main, direction = jax.tree.map(np.asarray, (main, direction))
    shrink = np.float32(1) - lr * np.float32(0.1)
    np.testing.assert_array_equal(
        found["matrix"], main["matrix"] * shrink - lr * direction["matrix"]
    )
    np.testing.assert_array_equal(found["gain"], main["gain"] - lr * direction["gain"])


@pytest.mark.parametrize(
    "transformation",
    [optax.trace(0.9), optax.scale_by_rms(), optax.scale_by_lion()],
    ids=["momentum", "rms", "lion"],
)
def test_any_transformation_gives_the_direction(transformation):
    main, grads = jax.tree.map(jnp.asarray, (gradients(0), gradients(1)))
    rates = {"lr": jnp.float32(0.5), "weight_decay": 0.0, "decay": DECAY}
    found, opt_state = update(transformation, grads, transformation.init(main), main, **rates)
    direction, wanted = transformation.update(grads, transformation.init(main), main)
    chex.assert_trees_all_equal(opt_state, wanted)
    chex.assert_trees_all_equal(found, jax.tree.map(lambda w, d: w - 0.5 * d, main, direction))
