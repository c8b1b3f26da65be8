"""A process that writes checkpoints until it is stopped, one way or another.

python -m tests.checkpoint.writer RUN_DIR NUM_STEPS [--limit-after STEP BYTES]: prints each step
that is whole, or what a user reads. Its arrays are no model's, so that it starts fast.
"""

import argparse
import resource
import signal
import sys

import jax.numpy as jnp
import numpy as np
import optax

from olmo_jax.checkpoint import Checkpoints, Position
from olmo_jax.config.records import CheckpointConfig, Config
from olmo_jax.errors import UserError
from olmo_jax.train.state import State


def state_of(step: int) -> State:
    """Return a state whose every number tells its step."""
    leaves = {
        "head.weight": jnp.asarray(np.full((64, 1000), step, np.float32)),
        "body.moe.experts.up": jnp.asarray(np.full((3, 4, 20, 30), step, np.float32)),
        "head.norm.gain": jnp.asarray(np.full(7, step, np.float32)),
    }
    return State(
        weights={},
        main=leaves,
        opt_state=optax.ScaleByAdamState(jnp.int32(step), leaves, leaves),
        expert_bias={},
        history={"losses": jnp.zeros(4), "grad_norms": jnp.zeros(4), "size": jnp.int32(0)},
        step=jnp.int32(step),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("steps", type=int)
    parser.add_argument("--limit-after", type=int, nargs=2, default=(-1, 0))
    given = parser.parse_args()
    last, limit = given.limit_after
    config = Config()
    try:
        with Checkpoints(given.run_dir, CheckpointConfig(keep=1)) as checkpoints:
            checkpoints.clean()
            first = max(checkpoints.steps(), default=0) + 1
            for step in range(first, first + given.steps):
                if step == last + 1:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                position = Position(step, 2 * step, 9 * step)
                checkpoints.save(state_of(step), position, config=config, facts={})
                checkpoints.wait()
                print(step, flush=True)
    except UserError as error:
        print(f"refused: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
