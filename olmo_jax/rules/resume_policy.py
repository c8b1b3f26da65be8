"""Which keys may differ when a run resumes from a checkpoint, and why: from two configs alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from olmo_jax.config.messages import known_keys, listing, show
from olmo_jax.config.records import Config
from olmo_jax.mesh.axes import DENSE_DATA_AXES

Verdict = Literal["may", "never", "seed", "data", "content"]
"""`seed` and `data` may change with that flag; `content` may change, what it names may not."""

ALLOWABLE = ("seed", "data", "tokenizer", "model")
"""What --allow-change takes; `model` only where weights start another run, or are evaluated."""


class Policy(NamedTuple):
    verdict: Verdict
    why: str


POLICIES: dict[str, Policy] = {
    "run_dir": Policy("may", "a folder may have been moved"),
    "seed": Policy("seed", "the data's order, forced routes and jitter are drawn from it"),
    "mesh": Policy("may", "a checkpoint knows no mesh; what a balance scope counts is said"),
    "parallel": Policy("may", "a checkpoint knows no method; capacity is no part of the model"),
    "model": Policy("never", "leaves have its shapes, or weights were trained for what it does"),
    "optim": Policy("may", "rates and rules hold from the next step on"),
    "data.sources": Policy("content", "a folder may have been moved; its tokens decide"),
    "data.eval_fraction": Policy("data", "it decides which documents are trained on"),
    "data.document_attention": Policy("data", "it decides what a position sees"),
    "data.threads": Policy("may", "it changes how batches are read, and not their tokens"),
    "data.prefetch": Policy("may", "it changes how batches are read, and not their tokens"),
    "train.steps": Policy("may", "a run may get longer or shorter; a schedule may end with it"),
    "train.global_batch": Policy("may", "the data's position counts sequences, and not steps"),
    "train.microbatch": Policy(
        "may",
        "it divides a step; only a balance scope over microbatches sums otherwise, and is said",
    ),
    "train.sequence_length": Policy(
        "data", "rows are cut by it, and the data's position counts rows"
    ),
    "train.z_loss_weight": Policy("never", "it is part of what is minimised, as model.router is"),
    "train.head_chunk_tokens": Policy("may", "it changes memory, and the loss by rounding"),
    "train.eval_every": Policy("may", "an evaluation changes no state"),
    "train.eval_batches": Policy("may", "an evaluation changes no state"),
    "train.recompute": Policy("may", "it changes memory and time"),
    "train.record_expert_counts": Policy("may", "it changes what is written of a step"),
    "train.deterministic": Policy("may", "it chooses between kernels of one function"),
    "train.step_timeout_s": Policy("may", "it changes no step"),
    "train.first_step_timeout_s": Policy("may", "it changes no step"),
    "train.max_bad_steps": Policy("may", "it changes no step"),
    "train.profile": Policy("may", "it changes no step"),
    "checkpoint": Policy("may", "it changes no step"),
}
"""By dotted key or section: whether it may differ when a run resumes, and why."""


class Change(NamedTuple):
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {show(self.before)} -> {show(self.now)}"


def policy_of(key: str) -> Policy:
    """Return the rule of a dotted key: its own, or that of the section that it is in."""
    parts = key.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(POLICIES[name] for name in names if name in POLICIES)


def compared_keys() -> list[str]:
    """Return every dotted key that holds a value: what is compared, lists as a whole."""
    every = list(known_keys())
    return [key for key in every if not any(other.startswith(f"{key}.") for other in every)]


def changes(before: Mapping[str, Any], now: Config) -> list[Change]:
    """Return what differs from the config of a checkpoint; a key that it lacks had its default."""
    default, new = Config().model_dump(mode="json"), now.model_dump(mode="json")
    found = [
        Change(key, _value(before, key, _value(default, key)), _value(new, key))
        for key in compared_keys()
    ]
    return [change for change in found if change.before != change.now]


def other_balance(before: Mapping[str, Any], now: Config) -> Iterator[str]:
    """Say that a balance loss over microbatches takes other tokens together than a checkpoint's.

    With scope `instance` a row stands alone, however rows are divided.
    """
    model, new = now.model, now.model_dump(mode="json")
    scope, routed = model.router.balance_scope, model.num_routed_layers > 0
    if scope == "instance" or not routed or model.router.balance_weight == 0:
        return
    default = Config().model_dump(mode="json")
    keys = _BALANCED_OVER[scope]
    old = [_value(before, key, _value(default, key)) for key in keys]
    own = [_value(new, key) for key in keys]
    if _tokens_together(scope, old) != _tokens_together(scope, own):
        words = [f"{key} {a} -> {b}" for key, a, b in zip(keys, old, own, strict=True) if a != b]
        yield (
            f"model.router.balance_scope={scope} counts experts over other tokens from here on, "
            f"because of {listing(words, 'and')}: the balance loss is another one; "
            "model.router.balance_scope=instance, in a new run, does not depend on it"
        )


_BALANCED_OVER = {
    "microbatch": ("train.microbatch", "mesh.sequence"),
    "global": ("train.microbatch", *(f"mesh.{axis}" for axis in DENSE_DATA_AXES)),
}
"""By scope of the balance loss, the keys that say which tokens are counted together."""


def _tokens_together(scope: str, values: Sequence[int]) -> Fraction:
    """Return the rows that are counted together: a rank of `sequence` has a part of each."""
    microbatch, *sizes = values
    ranks = math.prod(sizes)
    return microbatch * (Fraction(1, ranks) if scope == "microbatch" else Fraction(ranks))


def _value(tree: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree
