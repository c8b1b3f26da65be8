"""The skip rule against plain lists."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_jax.optim import skip


@partial(jax.jit, static_argnames=("window", "sigma"))
def _judge_all(losses, norms, *, window, sigma):
    def body(history, values):
        take, history = skip.judge(history, *values, sigma)
        return history, take

    return jax.lax.scan(body, skip.init(window), (losses, norms))


def judge_all(losses, norms=None, *, window, sigma):
    losses = np.asarray(losses, np.float32)
    norms = np.ones_like(losses) if norms is None else np.asarray(norms, np.float32)
    history, taken = _judge_all(losses, norms, window=window, sigma=sigma)
    return taken.tolist(), history


def test_an_outlier_is_skipped_and_the_step_after_it_is_taken():
    assert judge_all([3.0, 1e9, 3.0], window=2, sigma=1.0)[0] == [True, False, True]


@pytest.mark.parametrize(
    ("loss", "norm", "take"),
    [(1.0, 1.0, True), (2.0, 1.0, False), (1.0, 2.0, False), (2.0, 2.0, False), (0.5, 0.5, True)],
)
def test_loss_and_norm_must_both_be_within_and_only_a_rise_counts(loss, norm, take):
    taken, _ = judge_all([1.0, 1.0, loss], [1.0, 1.0, norm], window=6, sigma=1.0)
    assert taken == [True, True, take]


def test_after_a_constant_past_any_rise_is_skipped():
    constant = np.float32(2.3)
    rise = np.nextafter(constant, np.float32(9))
    for last, take in ((constant, True), (rise, False)):
        taken, _ = judge_all([constant] * 100 + [last], window=128, sigma=6.0)
        assert taken == [True] * 100 + [take]


@pytest.mark.parametrize(("window", "first"), [(2, 2), (5, 2), (6, 3), (128, 64)])
def test_nothing_is_refused_before_the_history_is_half_full(window, first):
    taken, _ = judge_all(2.0 ** np.arange(70), window=window, sigma=1.0)
    assert taken.index(False) + 1 == first


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["loss", "norm"])
def test_a_bad_step_is_skipped_and_forgotten(bad, which):
    losses, norms = [1.0, 2.0, 1.5, 1.2], [2.0, 1.0, 1.5, 1.2]
    _, expected = judge_all(losses, norms, window=6, sigma=9.0)
    for place in range(5):
        pair = (bad, 1.0) if which == "loss" else (1.0, bad)
        taken, history = judge_all(
            np.insert(losses, place, pair[0]),
            np.insert(norms, place, pair[1]),
            window=6,
            sigma=9.0,
        )
        assert [not take for take in taken] == [i == place for i in range(5)]
        chex.assert_trees_all_equal(history, expected)


def test_a_refused_step_enters_the_history_and_the_oldest_one_leaves():
    taken, history = judge_all([1.0, 2.0, 3.0, 1e6, 5.0], window=3, sigma=1.0)
    assert taken[3] is False
    assert history["losses"].tolist() == [3.0, 1e6, 5.0]
    assert history["size"] == 3


def within(past, value, sigma):
    """Return the rule for one series and how far the value is from its limit."""
    if len(past) < 2:
        return False, np.inf
    limit = np.mean(past) + sigma * np.std(past, ddof=1)
    return value <= limit, abs(value - limit)


def by_lists(losses, norms, window, sigma):
    """Return each step's verdict in FP64, None where rounding could decide it."""
    seen, verdicts = [], []
    for pair in zip(losses.tolist(), norms.tolist(), strict=True):
        if not np.isfinite(pair).all():
            verdicts.append(False)
            continue
        seen = [*seen, pair][-window - 1 :]
        if len(seen) < max(2, window // 2):
            verdicts.append(True)
            continue
        past = np.array(seen[:-1]).reshape(-1, 2)
        checks = [within(past[:, i], pair[i], sigma) for i in range(2)]
        close = any(margin < 1e-4 for _, margin in checks)
        verdicts.append(None if close else all(ok for ok, _ in checks))
    return verdicts


@pytest.mark.parametrize(("window", "sigma"), [(2, 1.0), (5, 1.0), (9, 2.0), (128, 1.5)])
def test_verdicts_equal_those_of_plain_lists(window, sigma):
    decided = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        losses, norms = random.normal(5.0, 1.0, (2, 400)).astype(np.float32)
        losses[random.random(400) < 0.05] *= 10
        norms[random.random(400) < 0.03] = np.nan
        losses[random.random(400) < 0.03] = np.inf
        taken, _ = judge_all(losses, norms, window=window, sigma=sigma)
        expected = by_lists(losses, norms, window, sigma)
        assert all(want in (None, got) for got, want in zip(taken, expected, strict=True))
        decided += sum(verdict is not None for verdict in expected)
    assert decided > 0.99 * 20 * 400


def test_keep_selects_whole_trees():
    new, old = {"a": jnp.ones(2), "n": jnp.int32(1)}, {"a": jnp.full(2, jnp.nan), "n": jnp.int32(0)}
    for take, expected in ((True, new), (False, old)):
        got = skip.keep(jnp.bool_(take), new, old)
        chex.assert_trees_all_equal(got, expected)
