"""Resuming a run: what is refused of its config and its data, and what is said of the rest."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from olmo_jax.checkpoint import Saved
from olmo_jax.config.messages import show, together
from olmo_jax.config.records import Config
from olmo_jax.data.corpus import Corpus
from olmo_jax.data.shards import evenly
from olmo_jax.data.token_manifest import digest
from olmo_jax.errors import UserError
from olmo_jax.rules.resume_policy import Change, Policy, changes, other_balance, policy_of
from olmo_jax.train import horizon

MASK_SAMPLES = 1024

HELD_OUT = "held_out_fraction"
"""The name under which a checkpoint keeps how much its weights never saw: see `never_seen`."""


def held_out_by(saved: Saved) -> float:
    """Return the fraction of the documents that a checkpoint's weights were never trained on."""
    recorded = saved.facts.get(HELD_OUT)
    return saved.config["data"]["eval_fraction"] if recorded is None else float(recorded)


def never_seen(config: Config, earlier: Saved | None) -> float:
    """Return the smallest `data.eval_fraction` of a run so far: what no part of it trained on.

    `earlier` is the checkpoint that it resumes from, or takes its weights from.

    A document is held out by its own hash, so a larger fraction holds out those of a smaller one.
    """
    now = config.data.eval_fraction
    return now if earlier is None else min(now, held_out_by(earlier))


def seen(config: Config, earlier: Saved | None) -> Iterator[str]:
    """Yield how many of the documents that a run holds out its weights were trained on."""
    held_out, fraction = config.data.eval_fraction, never_seen(config, earlier)
    if held_out > fraction:
        yield (
            f"data.eval_fraction={show(held_out)} holds out documents that these weights were "
            f"trained on, about {1 - fraction / held_out:.0%} of them: eval_loss says less than it "
            "seems"
        )


def refuse_config(earlier: Saved, config: Config, allowed: Collection[str]) -> None:
    """Refuse changed keys that may not change, all in one message.

    Raises: UserError.
    """
    ruled = [(change, policy_of(change.key)) for change in changes(earlier.config, config)]
    fine = {"may", "content", *allowed}
    faults = [
        _fault(change, policy, earlier.folder)
        for change, policy in ruled
        if policy.verdict not in fine
    ]
    if faults:
        raise UserError(together(faults))


def _fault(change: Change, policy: Policy, folder: object) -> str:
    way_out = (
        "another run_dir for a new run (checkpoint.init_from starts it from these weights)"
        if policy.verdict == "never"
        else f"allow it with --allow-change {policy.verdict}"
    )
    return (
        f"{change.key}={show(change.now)}, and {folder} has {change.key}={show(change.before)}; it "
        f"may not change as a run resumes, for {policy.why}; write "
        f"{change.key}={show(change.before)}, or {way_out}"
    )


def facts_of(corpus: Corpus) -> dict[str, str]:
    """Return what identifies the tokens and the tokenizer, whatever the folders are called.

    Of a label mask a sample counts: reading all of it takes as long as the data is large.
    """
    # What would change the sequences: tokens, weights of the mixture, label masks. Not the path.
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
        "data.sources has other tokens, masks or weights than this run was trained on; a run "
        "resumes on the same data, wherever it lies; name the folders that hold it"
    ),
    "tokenizer": (
        "data.sources was tokenized with another tokenizer than this run was trained on; a token "
        "id must keep its meaning; tokenize with the run's tokenizer.json"
    ),
}
"""What is wrong with each fact that differs, and what to write."""


def said(earlier: Saved, config: Config, other: Sequence[str]) -> Iterator[str]:
    """Yield where a run resumes, a line for everything that changed, and what is not read."""
    step, sequences, tokens = earlier.position
    yield (
        f"resuming from {earlier.folder}: {step} steps, {sequences:,} sequences, {tokens:,} tokens"
    )
    for change in [*map(str, changes(earlier.config, config)), *other]:
        yield f"changed: {change}"
    yield from other_balance(earlier.config, config)
    yield from horizon.said(earlier, config)
    yield from seen(config, earlier)
    if config.checkpoint.init_from is not None:
        yield (
            f"checkpoint.init_from={config.checkpoint.init_from} is not read: the run has a "
            "checkpoint of its own"
        )
