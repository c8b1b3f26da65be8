"""Going on with a run: which keys may differ from the checkpoint's, and what is said of each."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from olmo_jax.checkpoint import Saved
from olmo_jax.config.messages import known_keys, show, together
from olmo_jax.config.records import Config
from olmo_jax.data.corpus import Corpus
from olmo_jax.data.manifest import digest
from olmo_jax.data.shards import evenly
from olmo_jax.errors import UserError

Verdict = Literal["may", "never", "seed", "data", "content"]
"""`seed` and `data` may change with that flag; `content` may change, what it names may not."""

ALLOWABLE = ("seed", "data", "tokenizer")
"""What --allow-change takes."""

MASK_SAMPLES = 1024


class Rule(NamedTuple):
    verdict: Verdict
    why: str


RULES: dict[str, Rule] = {
    "run_dir": Rule("may", "a folder may have been moved"),
    "seed": Rule("seed", "the data's order, forced routes and jitter are drawn from it"),
    "mesh": Rule("may", "a checkpoint knows no mesh"),
    "parallel": Rule("may", "a checkpoint knows no method; capacity is no part of the model"),
    "model": Rule("never", "leaves have its shapes, or the weights were trained for what it does"),
    "optim": Rule("may", "rates and rules hold from the next step on"),
    "data.sources": Rule("content", "a folder may have been moved; its tokens decide"),
    "data.eval_fraction": Rule("data", "it decides which documents are trained on"),
    "data.document_attention": Rule("data", "it decides what a position sees"),
    "data.threads": Rule("may", "it changes how batches are read, and not their tokens"),
    "data.prefetch": Rule("may", "it changes how batches are read, and not their tokens"),
    "train.steps": Rule("may", "a run may get longer or shorter; a schedule may end with it"),
    "train.global_batch": Rule("may", "the data's position counts sequences, and not steps"),
    "train.microbatch": Rule("may", "it divides a step, and is no part of its sum"),
    "train.sequence_length": Rule(
        "data", "rows are cut by it, and the data's position counts rows"
    ),
    "train.z_loss_weight": Rule("never", "it is part of what is minimised, as model.router is"),
    "train.head_chunk_tokens": Rule("may", "it changes memory, and the loss by rounding"),
    "train.eval_every": Rule("may", "an evaluation changes no state"),
    "train.eval_batches": Rule("may", "an evaluation changes no state"),
    "train.recompute": Rule("may", "it changes memory and time"),
    "train.record_expert_counts": Rule("may", "it changes what is written of a step"),
    "train.deterministic": Rule("may", "it chooses between kernels of one function"),
    "train.step_timeout_s": Rule("may", "it changes no step"),
    "train.first_step_timeout_s": Rule("may", "it changes no step"),
    "train.max_bad_steps": Rule("may", "it changes no step"),
    "train.profile": Rule("may", "it changes no step"),
    "checkpoint": Rule("may", "it changes no step"),
}
"""By dotted key or section: whether it may differ when a run goes on, and why."""


class Change(NamedTuple):
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {show(self.before)} -> {show(self.now)}"


def rule_of(key: str) -> Rule:
    """Return the rule of a dotted key: its own, or that of the section that it is in."""
    parts = key.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(RULES[name] for name in names if name in RULES)


def keys() -> list[str]:
    """Return every dotted key that holds a value: what is compared, lists as a whole."""
    every = list(known_keys())
    return [key for key in every if not any(other.startswith(f"{key}.") for other in every)]


def changes(before: Mapping[str, Any], now: Config) -> list[Change]:
    """Return what differs from the config of a checkpoint; a key that it lacks had its default."""
    default, new = Config().model_dump(mode="json"), now.model_dump(mode="json")
    found = [
        Change(key, _value(before, key, _value(default, key)), _value(new, key)) for key in keys()
    ]
    return [change for change in found if change.before != change.now]


def _value(tree: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def refuse_config(earlier: Saved, config: Config, allowed: Collection[str]) -> None:
    """Refuse changed keys that may not change, all in one message.

    Raises: UserError.
    """
    ruled = [(change, rule_of(change.key)) for change in changes(earlier.config, config)]
    fine = {"may", "content", *allowed}
    faults = [
        _fault(change, rule, earlier.folder) for change, rule in ruled if rule.verdict not in fine
    ]
    if faults:
        raise UserError(together(faults))


def _fault(change: Change, rule: Rule, folder: object) -> str:
    way_out = (
        "another run_dir for a new run (checkpoint.init_from starts it from these weights)"
        if rule.verdict == "never"
        else f"allow it with --allow-change {rule.verdict}"
    )
    return (
        f"{change.key}={show(change.now)}, and {folder} has {change.key}={show(change.before)}; it "
        f"may not change as a run goes on, for {rule.why}; write {change.key}={show(change.before)}"
        f", or {way_out}"
    )


def facts_of(corpus: Corpus) -> dict[str, str]:
    """Return what identifies the tokens and the tokenizer, whatever the folders are called.

    Of a label mask a sample counts: reading all of it takes as long as the data is large.
    """
    facts = []
    for config, source in zip(corpus.data.sources, corpus.sources, strict=True):
        facts += [source.fingerprint, repr(config.weight), *map(_sample, source.train.masks or ())]
    tokenizer = corpus.sources[0].manifest.tokenizer_sha256
    return {"data": digest(*facts), "tokenizer": tokenizer}


def _sample(mask: np.ndarray) -> str:
    return "".join(str(int(bool(mask[i]))) for i in evenly(len(mask), MASK_SAMPLES))


def refuse_facts(earlier: Saved, now: Mapping[str, str], allowed: Collection[str]) -> list[str]:
    """Refuse other data or another tokenizer than a checkpoint's; return what was allowed.

    Raises: UserError.
    """
    differing = [name for name in now if earlier.facts.get(name, now[name]) != now[name]]
    faults = [
        f"{_FACTS[name]}, or allow it with --allow-change {name} ({earlier.folder})"
        for name in differing
        if name not in allowed
    ]
    if faults:
        raise UserError(together(faults))
    return [f"{name} {earlier.facts[name][:12]} -> {now[name][:12]}" for name in differing]


_FACTS = {
    "data": (
        "data.sources has other tokens, masks or weights than this run was trained on; a run goes "
        "on in the same data, wherever it lies; name the folders that hold it"
    ),
    "tokenizer": (
        "data.sources was tokenized with another tokenizer than this run was trained on; a token "
        "id must keep its meaning; tokenize with the run's tokenizer.json"
    ),
}
"""What is wrong with each fact that differs, and what to write."""


def said(earlier: Saved, config: Config, other: Sequence[str]) -> Iterator[str]:
    """Yield where a run goes on, a line for everything that changed, and what is not read."""
    step, sequences, tokens = earlier.position
    yield (
        f"going on from {earlier.folder}: {step} steps, {sequences:,} sequences, {tokens:,} tokens"
    )
    for change in [*map(str, changes(earlier.config, config)), *other]:
        yield f"changed: {change}"
    if config.checkpoint.init_from is not None:
        yield (
            f"checkpoint.init_from={config.checkpoint.init_from} is not read: the run has a "
            "checkpoint of its own"
        )
