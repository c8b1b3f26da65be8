"""One process of a small job, started by the launcher's tests: a collective a step, as in a run.

Arguments: a run folder, a mode, and its words.
"""

import os
import signal
import sys
import time
from functools import partial

from olmo_jax.runtime import environment
from olmo_jax.runtime.processes import die_with_launcher, discover

STEPS = 3


def main(run_dir: str, mode: str, *words: str) -> None:
    die_with_launcher()
    processes = discover()
    environment.prepare(4, processes)
    from olmo_jax.runtime.connection import connect

    connect(processes)
    work = {"sum": total, "hang": hang, "ready": ready}[mode]
    work(run_dir, processes, *words)


def total(run_dir, processes) -> None:
    """Add over all devices; then let the last rank stay away from a barrier for too long."""
    from olmo_jax.errors import UserError
    from olmo_jax.runtime.barrier import barrier

    value, devices = summed()
    print(f"rank {processes.index} of {processes.count}: {devices} devices, sum {value:g}")
    barrier("before the first step", 60.0)
    if processes.index == processes.count - 1:
        time.sleep(1.5)
    else:
        try:
            barrier("saving step 7", 0.5)
        except UserError as error:
            print(error)
    barrier("at the end", 60.0)


def summed() -> tuple[float, int]:
    """Return 0 + 1 + ... over all devices of the job, in mesh order."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from olmo_jax.mesh.devices import build_mesh

    mesh = build_mesh({"data": 4, "pipeline": 1, "fsdp": 1, "expert": 1, "sequence": 1})
    spec = PartitionSpec("data")
    numbers = np.arange(4, dtype=np.float32)
    placed = jax.make_array_from_callback((4,), NamedSharding(mesh, spec), numbers.__getitem__)
    reduce = jax.shard_map(
        partial(jax.lax.psum, axis_name="data"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    mine = jax.jit(reduce)(placed).addressable_shards[0].data
    # As the loop waits for a step.
    return float(jax.device_get(mine)[0]), jax.device_count()


def hang(run_dir, processes, rank, how) -> None:
    """Sleep or stop for ever in step 3 of one rank; the others wait for it in a collective."""
    from olmo_jax.runtime.watchdog import Watchdog

    with Watchdog(run_dir, processes.index, processes.count, 60.0, 1.0) as dog:
        for step in range(1, STEPS + 1):
            dog.phase(f"step {step}")
            if step == STEPS and processes.index == int(rank):
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(1000)
            summed()
            dog.beat(step)


def ready(run_dir, processes) -> None:
    """Say so, and wait for a signal."""
    print("ready")
    time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
