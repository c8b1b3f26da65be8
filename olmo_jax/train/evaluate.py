"""Evaluate a run's last weights on its held-out documents, with the code that training uses."""

from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
from pydantic import ValidationError

from olmo_jax.checkpoint import (
    Saved,
    check_weights,
    model_of,
    read_saved,
    refuse_other_model,
    refuse_other_tokenizer,
    refuse_other_tokenizer_file,
    restore_weights,
    tokenizer_of,
)
from olmo_jax.config import Config
from olmo_jax.data.corpus import Corpus, corpus_of, open_corpus
from olmo_jax.data.token_manifest import shard_fingerprint
from olmo_jax.errors import UserError
from olmo_jax.rules.resume_policy import changes, policy_of
from olmo_jax.train import resume_checks
from olmo_jax.train.metrics import Evaluation, evaluation_of
from olmo_jax.train.program import Program, build_here
from olmo_jax.train.state import State


def evaluate(
    run_dir: Path, config: Config, allowed: Collection[str] = ()
) -> tuple[Evaluation, list[str]]:
    """Return mean loss and perplexity of the run's weights under `config`, and what is to be said.

    Raises: UserError if no document is held out or none has a label, if the tokens are of another
        tokenizer than the run's, or if the model computes something else and "model" is not
        allowed.
    """
    if config.data.eval_fraction == 0:
        raise UserError(
            "data.eval_fraction=0 holds no document out, so there is nothing to evaluate on; write "
            "data.eval_fraction=0.01, which takes documents that this run was trained on"
        )
    saved = read_saved(run_dir)
    refuse_other_tokenizer_file(saved)
    corpus = corpus_of(config)
    refuse_other_tokenizer(saved.folder, tokenizer_of(saved), resume_checks.facts_of(corpus))
    program = build_here(config)
    like = program.abstract_stored()
    check_weights(saved, like.main | like.expert_bias, program.config)
    other = refuse_other_model(saved.folder, model_of(saved), config.model, allowed)
    state = restored(program, run_dir, saved.position.step)
    train = program.config.train
    batches = corpus.held_out(train.global_batch, train.eval_batches, program.rows)
    # One at a time: XLA:CPU deadlocks when dozens of programs with collectives are queued.
    parts = [jax.device_get(program.evaluate(state, program.put(batch))) for batch in batches]
    return evaluation_of(parts), [
        *seen(saved, corpus),
        *map(str, other),
        *other_rows(saved, config),
    ]


def seen(saved: Saved, corpus: Corpus) -> list[str]:
    """Say how many of the documents that an evaluation holds out the weights were trained on.

    A document is held out by its own hash, so a larger fraction holds out those of a smaller one.
    """
    there = shards_of(corpus)
    is_same = resume_checks.facts_of(corpus)["data"] == saved.facts.get("data")
    trained = there if is_same else trained_shards(saved)
    if trained is None:
        return ["the run's data is not there: it may have been trained on these documents"]
    before, now = resume_checks.held_out_by(saved), corpus.data.eval_fraction
    if not there & trained or now <= before:
        return []
    share = f"about {1 - before / now:.0%}" if there <= trained else "a part"
    return [f"trained on {share} of these documents"]


def other_rows(saved: Saved, config: Config) -> list[str]:
    """Say what of an evaluation's rows is not as the weights were trained; `seen` has the holdout.

    Those keys decide it whose change a resumed run needs `--allow-change data` for.
    """
    return [
        str(change)
        for change in changes(saved.config, config)
        if policy_of(change.key).verdict == "data" and change.key != "data.eval_fraction"
    ]


def trained_shards(saved: Saved) -> set[str] | None:
    """Return the shards that a checkpoint's run reads; None if its data is not there any more."""
    try:
        config = Config.model_validate({"data": saved.config["data"]})
        corpus = open_corpus(
            config.data,
            sequence_length=saved.config["train"]["sequence_length"],
            seed=saved.seed,
            vocab_size=model_of(saved).vocab_size,
        )
    except (UserError, ValidationError, OSError):
        return None
    same = resume_checks.facts_of(corpus)["data"] == saved.facts.get("data")
    return shards_of(corpus) if same else None


def shards_of(corpus: Corpus) -> set[str]:
    """Return the fingerprints of the shards that a corpus reads."""
    return {
        shard_fingerprint(shard)
        for source in corpus.sources
        for shard in source.manifest.files
        if shard.tokens in source.train.names
    }


def restored(program: Program, run_dir: Path, step: int) -> State:
    """Return a run's weights after a step as the part of a state that an evaluation reads.

    Raises: UserError if they are another model's.
    """
    like = program.abstract_stored()
    found = restore_weights(run_dir, like.main | like.expert_bias, step, config=program.config)
    main = program.staged({name: found[name] for name in like.main})
    return State(
        weights=program.rebuild(main),
        main=main,
        opt_state=(),
        expert_bias={name: found[name] for name in like.expert_bias},
        history={},
        step=jnp.zeros((), jnp.int32),
    )
