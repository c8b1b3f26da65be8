"""Evaluate a run's last weights on its held-out documents, with the code that training uses."""

from pathlib import Path

import jax
import jax.numpy as jnp

from olmo_jax.checkpoint import restore_weights
from olmo_jax.config import Config
from olmo_jax.data.corpus import corpus_of
from olmo_jax.errors import UserError
from olmo_jax.train.metrics import Evaluation, evaluation_of
from olmo_jax.train.program import Program, build_here
from olmo_jax.train.state import State


def evaluate(run_dir: Path, config: Config) -> Evaluation:
    """Return mean loss and perplexity of the run's weights under `config`.

    Raises: UserError if no document is held out.
    """
    if config.data.eval_fraction == 0:
        raise UserError(
            "data.eval_fraction=0 holds no document out, so there is nothing to evaluate on; write "
            "data.eval_fraction=0.01, which takes documents that this run was trained on"
        )
    corpus = corpus_of(config)
    program = build_here(config)
    config = program.config
    state = restored(program, run_dir)
    batches = corpus.held_out(config.train.global_batch, config.train.eval_batches, program.rows)
    # One at a time: XLA:CPU deadlocks when dozens of programs with collectives are queued.
    parts = [jax.device_get(program.evaluate(state, program.put(batch))) for batch in batches]
    return evaluation_of(parts)


def restored(program: Program, run_dir: Path) -> State:
    """Return a run's last weights as the part of a state that an evaluation reads.

    Raises: UserError if the run has none, or if they are another model's.
    """
    like = program.abstract_stored()
    found = restore_weights(run_dir, like.main | like.expert_bias, config=program.config)
    main = program.staged({name: found[name] for name in like.main})
    return State(
        weights=program.rebuild(main),
        main=main,
        opt_state=(),
        expert_bias={name: found[name] for name in like.expert_bias},
        history={},
        step=jnp.zeros((), jnp.int32),
    )
