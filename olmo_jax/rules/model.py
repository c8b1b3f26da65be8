"""What must hold between the keys of `model`."""

import itertools
import math
from collections.abc import Iterator

from olmo_jax.config.messages import divisors, listing, show
from olmo_jax.config.records import Config


def dense_layers(config: Config) -> Iterator[str]:
    model = config.model
    dense, layers = model.num_dense_layers, model.num_layers
    if dense > layers:
        yield (
            f"model.num_dense_layers={dense} is above model.num_layers={layers}; use 0 to {layers}"
        )
    elif dense and not model.dense_hidden:
        yield (
            f"model.dense_hidden=0, but {dense} of the layers are dense and need a width; "
            "use 1 or more, or model.num_dense_layers=0"
        )


def routed_layers(config: Config) -> Iterator[str]:
    model = config.model
    if model.num_routed_layers <= 0:
        return
    for key in ("num_experts", "top_k", "expert_hidden"):
        if getattr(model, key) == 0:
            yield (
                f"model.{key}=0, but {model.num_routed_layers} of the layers are routed and need "
                f"1 or more; use 1 or more, or model.num_dense_layers={model.num_layers}"
            )
    if 0 < model.num_experts < model.top_k:
        yield (
            f"model.top_k={model.top_k} is above model.num_experts={model.num_experts}; "
            f"use 1 to {model.num_experts}"
        )


def heads_divide(config: Config) -> Iterator[str]:
    heads, kv_heads = config.model.num_heads, config.model.num_kv_heads
    if heads % kv_heads:
        yield (
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}; "
            f"use {listing(divisors(heads))}"
        )


def partial_that_rotates(num_dims: int, width: int) -> float:
    """Return a share of `width` that is `num_dims` when multiplied and cut: millionths, rounded up.

    The quotient itself may not be: 47 * (6 / 47) and 100 * 0.58 are just below 6 and 58.
    """
    first = math.ceil(num_dims * 1_000_000 / width)
    shares = (millionths / 1_000_000 for millionths in itertools.count(first))
    return next(share for share in shares if int(width * share) >= num_dims)


def _rotated_advice(width: int, partial: float, rotated: int) -> str:
    if partial == 1.0:
        return f"use model.head_dim={listing([n for n in (width - 1, width + 1) if n > 1])}"
    if width == 1:
        return "use model.head_dim=2 and model.rope.partial=1.0"
    pairs = [n for n in (rotated - 1, rotated + 1) if 2 <= n <= width] or [2]
    shares = [show(partial_that_rotates(n, width)) for n in pairs]
    return f"use model.rope.partial={listing(shares)}"


def rotated_dims(config: Config) -> Iterator[str]:
    """Rotary positions turn pairs of dims."""
    width, partial = config.model.head_dim, config.model.rope.partial
    rotated = int(width * partial)
    if rotated < 2 or rotated % 2:
        yield (
            f"model.rope.partial={show(partial)} of model.head_dim={width} rotates {rotated} dims, "
            f"but they turn in pairs, 1 or more; {_rotated_advice(width, partial, rotated)}"
        )


def rope_scaling(config: Config) -> Iterator[str]:
    rope = config.model.rope
    if rope.scaling in ("pi", "stepwise", "yarn") and rope.factor < 1:
        yield (
            f"model.rope.factor={show(rope.factor)} would shorten the context that "
            f"model.rope.scaling={rope.scaling} extends; use 1 or more"
        )
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "stepwise" and low >= high:
        yield (
            f"model.rope.low_frequency_factor={show(low)} is not below "
            f"model.rope.high_frequency_factor={show(high)}; use for instance 1 and 4"
        )
    if rope.scaling == "yarn" and rope.beta_slow >= rope.beta_fast:
        yield (
            f"model.rope.beta_slow={show(rope.beta_slow)} is not below "
            f"model.rope.beta_fast={show(rope.beta_fast)}; use for instance 1 and 32"
        )


def window_sizes(config: Config) -> Iterator[str]:
    pattern = config.model.windows.pattern
    wrong = [window for window in pattern if window < 1 and window != -1]
    if wrong:
        yield (
            f"model.windows.pattern={show(pattern)} has {listing(wrong, 'and')}, which is not "
            "a number of positions; use 1 or more (the position itself counts), or -1 for all"
        )


def groups_together(config: Config) -> Iterator[str]:
    router = config.model.router
    if (router.num_groups is None) == (router.top_groups is None):
        return
    given, missing = ("num_groups", "top_groups")[:: 1 if router.top_groups is None else -1]
    value = getattr(router, given)
    yield (
        f"model.router.{given}={value} is given without model.router.{missing}, and group-limited "
        f"routing needs both; write model.router.{missing}, or set model.router.{given}=null"
    )


def groups_gating(config: Config) -> Iterator[str]:
    """Groups are ranked by sums of scores; topk_softmax selects by raw logits."""
    router = config.model.router
    if router.gating == "topk_softmax" and router.num_groups is not None:
        yield (
            f"model.router.num_groups={router.num_groups} does not go with "
            "model.router.gating=topk_softmax, which selects by logits and not by scores; use "
            "model.router.gating=softmax or sigmoid, or model.router.num_groups=null"
        )


def groups_fit(config: Config) -> Iterator[str]:
    model, router = config.model, config.model.router
    groups, kept, experts = router.num_groups, router.top_groups, model.num_experts
    if groups is None or kept is None or experts == 0 or model.num_routed_layers <= 0:
        return
    if experts % groups:
        yield (
            f"model.router.num_groups={groups} does not divide model.num_experts={experts}; "
            f"use {listing(divisors(experts))}"
        )
    elif kept > groups:
        yield (
            f"model.router.top_groups={kept} is above model.router.num_groups={groups}; "
            f"use 1 to {groups}"
        )
    elif model.top_k > kept * (experts // groups):
        fewest = math.ceil(model.top_k / (experts // groups))
        yield (
            f"model.top_k={model.top_k} is above the {kept * (experts // groups)} experts in "
            f"model.router.top_groups={kept} groups of {experts // groups}; use "
            f"model.top_k={kept * (experts // groups)} or less"
            + (f", or model.router.top_groups={fewest} or more" if fewest <= groups else "")
        )
