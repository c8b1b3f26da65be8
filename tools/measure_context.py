"""Measure context parallelism: memory of a device and bytes sent, rows of one length cut ever more.

python tools/measure_context.py
python tools/measure_context.py --length 1024 --sequence 1 2

One row a microbatch, on as many devices as `mesh.sequence`. Memory is what the compiled step needs
beside its state, without the gradients: activations kept for backward, buffers of transfers, work
space. XLA:CPU widens bf16 where it computes, so a GPU needs less. Bytes are the plan's, for one
microbatch and layer of attention.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from olmo_jax.config.records import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    SourceConfig,
    TrainConfig,
)
from olmo_jax.errors import UserError
from olmo_jax.formatting import MIB
from olmo_jax.rules import validate
from olmo_jax.runtime.environment import prepare

METHODS: tuple[Literal["ulysses", "ring"], ...] = ("ulysses", "ring")


def config_of(options: argparse.Namespace, method: Any, ranks: int, recompute: Any) -> Config:
    """Return the config of one point.

    Raises: UserError if the sizes do not fit each other.
    """
    model = ModelConfig(
        num_layers=options.layers,
        num_dense_layers=0,
        d_model=options.width,
        num_heads=options.width // 32,
        num_kv_heads=options.width // 64,
        expert_hidden=options.width,
        shared_hidden=options.width,
    )
    return validate(
        Config(
            mesh=MeshConfig(sequence=ranks),
            parallel=ParallelConfig(context=method),
            model=model,
            # Nothing is read and nothing runs.
            data=DataConfig(sources=(SourceConfig(path="none"),)),
            train=TrainConfig(global_batch=2, sequence_length=options.length, recompute=recompute),
        )
    )


def activation_bytes(config: Config) -> int:
    """Return the temporary memory of the compiled step without the gradients."""
    # Not at the top: jax is imported after `prepare` has set what it reads.
    from olmo_jax.inspect.contract import memory_bytes
    from olmo_jax.mesh.devices import build_mesh
    from olmo_jax.plan.state_memory import state_memory
    from olmo_jax.train.program import build

    sizes = dict(config.mesh)
    program = build(config, build_mesh(sizes))
    lowered = program.jitted.lower(*program.abstract_arguments())
    # How good the machine code is plays no part in the buffers.
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return memory_bytes(compiled)["temp"] - state_memory(program.layout).gradients


def sent_bytes(config: Config) -> float:
    """Return what attention sends over `sequence` for one microbatch and layer."""
    from olmo_jax.mesh.layout import Layout
    from olmo_jax.plan.communication import communication, total_bytes

    layout = Layout(config, dict(config.mesh))
    what = ("heads", "keys", "values", "gradients of keys and values")
    sent = total_bytes(communication(layout), what=what)
    return sent / config.model.num_layers / layout.num_microbatches


def measure(options: argparse.Namespace) -> Table:
    """Return one row for each method and number of ranks."""
    table = Table(title="MiB of one device", title_justify="left")
    for column in ("method", "mesh.sequence", "sent a layer"):
        table.add_column(column)
    for recompute in options.recompute:
        table.add_column(f"activations, recompute={recompute}", justify="right")
    for ranks in options.sequence:
        for method in METHODS if ranks > 1 else ("ulysses",):
            configs = [config_of(options, method, ranks, again) for again in options.recompute]
            used = [f"{activation_bytes(config) / MIB:.1f}" for config in configs]
            sent = f"{sent_bytes(configs[0]) / MIB:.2f}"
            table.add_row(method if ranks > 1 else "-", str(ranks), sent, *used)
    return table


def parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--sequence", type=int, nargs="+", default=(1, 2, 4), help="sizes of mesh.sequence")
    add("--recompute", nargs="+", default=("none", "block"), help="values of train.recompute")
    add("--length", type=int, default=4096, help="train.sequence_length")
    add("--layers", type=int, default=4, help="model.num_layers, all of them routed")
    add("--width", type=int, default=256, help="model.d_model, a multiple of 64")
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    options = parser().parse_args(arguments)
    prepare(max(options.sequence))
    try:
        Console().print(measure(options))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
