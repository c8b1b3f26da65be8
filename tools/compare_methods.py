"""Compare DDP, FSDP and HSDP on one model: bytes sent, step time, memory. A table and a picture.

python tools/compare_methods.py --output compare.png
python tools/compare_methods.py --quick
The model's code is the same for all; only the rules of the specs differ. Three series:
- bytes that one rank sends a step, against the microbatches of a step: by the plan, and checked
  against a count on the traced step;
- time of a step, against the same: median and interquartile range over repeats, taken in turn;
- memory of a device, against the number of experts: as compiled.
Without a GPU the mesh is emulated: its devices share this machine's cores, nothing crosses a wire,
and bf16 is widened on the way, so times and temporary memory say little about a cluster. Most of
the time goes into compiling; a second run takes the compiled programs from the cache.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from olmo_jax.config.records import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    RouterConfig,
    SourceConfig,
    TrainConfig,
)
from olmo_jax.errors import UserError
from olmo_jax.formatting import MIB
from olmo_jax.rules import validate
from olmo_jax.runtime.environment import prepare, runs_on_gpu

if TYPE_CHECKING:
    from olmo_jax.data.batch import Batch
    from olmo_jax.train.program import Program

MIN_WIDTH = 120
"""Columns of the output where it goes to a file or a narrow terminal."""
FORMATS = (".png", ".svg")

HUES = ("blue", "cyan", "green", "red", "orange", "olive", "purple", "brown")
MARKERS = "osD^v<>P"


class Method(NamedTuple):
    """A mesh, and what `parallel` says of it."""

    mesh: dict[str, int]
    parallel: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of one device: what goes in and stays, and what the step needs beside.

    `planned` of the temporary ones are gradients and gathered weights; the rest are activations
    and buffers.
    """

    state: int
    temporary: int
    planned: int

    @property
    def total(self) -> int:
        return self.state + self.temporary


@dataclasses.dataclass(frozen=True)
class Results:
    """By method: bytes and seconds for each number of microbatches, memory for each of experts."""

    sent: dict[str, dict[int, float]]
    times_s: dict[str, dict[int, list[float]]]
    memory: dict[str, dict[int, Compiled]]


def methods(num_devices: int) -> dict[str, Method]:
    """Return what is compared, on as many devices each."""
    experts = min(4, num_devices // 2)
    rest = num_devices // experts
    fsdp = {"method": "fsdp"}
    return {
        "DDP": Method({"data": num_devices}, {}),
        "DDP, whole state": Method({"data": num_devices}, {"shard_optimizer": False}),
        "DDP + EP": Method({"data": rest, "expert": experts}, {}),
        "FSDP": Method({"fsdp": num_devices}, fsdp),
        "FSDP after_backward": Method({"fsdp": num_devices}, fsdp | {"reshard": "after_backward"}),
        "FSDP step": Method({"fsdp": num_devices}, fsdp | {"reshard": "step"}),
        "HSDP": Method({"data": 2, "fsdp": num_devices // 2}, fsdp),
        "FSDP + EP": Method({"fsdp": rest, "expert": experts}, fsdp),
    }


def config_of(
    method: Method, options: argparse.Namespace, *, num_microbatches: int, num_experts: int
) -> Config:
    """Return the config of one point: routes are random, and as many rows a microbatch always.

    Raises: UserError if the sizes do not fit each other.
    """
    rows = options.microbatch * options.devices
    model = ModelConfig(
        num_layers=options.layers,
        num_dense_layers=0,
        d_model=options.width,
        num_heads=options.width // 32,
        num_kv_heads=options.width // 64,
        num_experts=num_experts,
        expert_hidden=options.width,
        shared_hidden=options.width,
        dense_hidden=3 * options.width,
        vocab_size=options.vocab,
        router=RouterConfig(assignment="random"),
    )
    return validate(
        Config(
            mesh=MeshConfig.model_validate(method.mesh),
            parallel=ParallelConfig(**method.parallel),
            model=model,
            # Nothing is read: the batches are drawn here.
            data=DataConfig(sources=(SourceConfig(path="none"),)),
            train=TrainConfig(
                global_batch=num_microbatches * rows,
                microbatch=options.microbatch,
                sequence_length=options.length,
            ),
        )
    )


def batch_of(config: Config) -> "Batch":
    """Return random tokens, one document a row."""
    from olmo_jax.data.batch import Batch

    shape = (config.train.global_batch, config.train.sequence_length)
    draw = np.random.default_rng(config.seed)
    tokens, labels = draw.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
    return Batch(
        tokens=tokens,
        labels=labels,
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        padding_mask=np.ones(shape, bool),
        sequence=np.arange(shape[0], dtype=np.int32),
    )


def program_of(config: Config) -> "Program":
    # Not at the top: jax is imported after `prepare` has set what it reads.
    from olmo_jax.mesh.devices import build_mesh
    from olmo_jax.train.program import build

    return build(config, build_mesh(dict(config.mesh)))


def sent_bytes(program: "Program") -> float:
    """Return what one rank sends a step by the plan; the traced step must agree."""
    from olmo_jax.inspect import jaxpr
    from olmo_jax.plan.communication import communication, total_bytes

    sizes = dict(program.config.mesh)
    planned = total_bytes(communication(program.layout))
    step = jaxpr.live(program.jitted.trace(*program.abstract_arguments()).jaxpr)
    counted = jaxpr.sent_bytes(jaxpr.collectives(step, sizes), sizes)
    if not math.isclose(planned, counted, rel_tol=1e-12):
        raise AssertionError(f"the plan has {planned} bytes, the step {counted}")
    return planned


def steps_of(program: "Program") -> Iterator[float]:
    """Take one step after the other, and yield the seconds of each; the first does not count."""
    import jax

    state, batch = program.init(), program.put(batch_of(program.config))
    while True:
        start = time.perf_counter()
        state, metrics = program.step(state, batch, 1e-3)
        jax.block_until_ready((state, metrics))
        yield time.perf_counter() - start


def times_in_turn(programs: Mapping[str, "Program"], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each program's steps, taken in turn: a busy machine slows all alike."""
    steps = {name: steps_of(program) for name, program in programs.items()}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, each in steps.items():
            taken[name].append(next(each))
    return {name: times[1:] for name, times in taken.items()}


def compiled_memory(program: "Program", *, timed: bool) -> Compiled:
    """Return what a step asks of one device; one that is not `timed` is compiled in a hurry."""
    from olmo_jax.inspect.contract import memory_bytes
    from olmo_jax.plan.state_memory import state_memory

    if timed or runs_on_gpu():
        compiled = program.compiled
    else:
        # How good the machine code is plays no part in the buffers.
        lowered = program.jitted.lower(*program.abstract_arguments())
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    found = memory_bytes(compiled)
    planned = state_memory(program.layout)
    return Compiled(found["alias"], found["temp"], planned.gradients + planned.gathered)


def measure(options: argparse.Namespace, progress: Progress) -> Results:
    """Measure everything, one number of microbatches after the other, then memory."""
    compared = {name: methods(options.devices)[name] for name in options.methods}
    number_of_points = len(options.microbatches) + len(options.experts) - 1
    task = progress.add_task("", total=len(compared) * number_of_points)
    results = Results(*({name: {} for name in compared} for _ in range(3)))
    experts, *more_experts = options.experts
    for number in options.microbatches:
        programs = {}
        for name, method in compared.items():
            progress.update(task, description=f"{name}, {number} microbatches")
            config = config_of(method, options, num_microbatches=number, num_experts=experts)
            programs[name] = program_of(config)
            results.sent[name][number] = sent_bytes(programs[name])
            # Of the last number of microbatches it stays.
            results.memory[name][experts] = compiled_memory(programs[name], timed=True)
            progress.advance(task)
        progress.update(task, description=f"steps of {number} microbatches")
        for name, times in times_in_turn(programs, options.repeats).items():
            results.times_s[name][number] = times
    for number in more_experts:
        for name, method in compared.items():
            progress.update(task, description=f"{name}, {number} experts")
            most = options.microbatches[-1]
            config = config_of(method, options, num_microbatches=most, num_experts=number)
            results.memory[name][number] = compiled_memory(program_of(config), timed=False)
            progress.advance(task)
    return results


def spread(times_s: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    if len(times_s) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times_s, n=4)
    return (high - low) / statistics.median(times_s)


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.2f}"


def tables(results: Results) -> Iterator[Table]:
    """Return the table of each series, one row a method."""
    yield _table(
        "MiB that one rank sends a step",
        {
            name: {f"m = {m}": mib(sent) for m, sent in row.items()}
            for name, row in results.sent.items()
        },
    )
    yield _table(
        "ms a step: median, and interquartile range as a part of it",
        {
            name: {
                f"m = {m}": f"{1e3 * statistics.median(times):.0f} ({spread(times):.0%})"
                for m, times in row.items()
            }
            for name, row in results.times_s.items()
        },
    )
    yield _table(
        "MiB of a device as compiled: state + temporary (of it gradients and gathered weights)",
        {
            name: {f"{number} experts": _memory_text(found) for number, found in row.items()}
            for name, row in results.memory.items()
        },
    )


def _memory_text(found: Compiled) -> str:
    return f"{mib(found.state)} + {mib(found.temporary)} ({mib(found.planned)})"


def _table(title: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(no_wrap=True)
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *row.values())
    return table


def draw(results: Results, note: str) -> Figure:
    """Return the picture of the three series."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    sent, times, memory = figure.subplots(1, 3)
    for series, name in enumerate(results.sent):
        style = {
            "color": f"tab:{HUES[series]}",
            "marker": MARKERS[series],
            "label": name,
            "alpha": 0.8,
        }
        row = results.sent[name]
        sent.plot(list(row), [value / MIB for value in row.values()], **style)
        taken = results.times_s[name]
        _draw_times(times, taken, style)
        held = results.memory[name]
        memory.plot(list(held), [value.total / MIB for value in held.values()], **style)
    sent.set(title="bytes sent a step and rank", xlabel="microbatches a step", ylabel="MiB")
    times.set(title="time of a step", xlabel="microbatches a step", ylabel="s")
    memory.set(title="memory of a device, as compiled", xlabel="experts", ylabel="MiB")
    for axes in (sent, times, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.legend(*sent.get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.suptitle(note, fontsize="small")
    return figure


def _draw_times(axes: Axes, taken: Mapping[int, Sequence[float]], style: dict[str, Any]) -> None:
    """Draw medians, with bars from the first to the third quartile."""
    medians = [statistics.median(times) for times in taken.values()]
    quartiles = [
        statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
        for times in taken.values()
    ]
    below = [median - low for median, (low, _, _) in zip(medians, quartiles, strict=True)]
    above = [high - median for median, (_, _, high) in zip(medians, quartiles, strict=True)]
    axes.errorbar(list(taken), medians, yerr=[below, above], capsize=2, **style)


def note_on(options: argparse.Namespace) -> str:
    """Return where the numbers come from."""
    if runs_on_gpu():
        return f"{options.devices} GPUs"
    return (
        f"{options.devices} devices emulated on one CPU: they share its cores, and FSDP's "
        "temporary memory is overstated, since bf16 is gathered as float32"
    )


def parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--devices", type=int, choices=(4, 8), default=8, help="devices of every mesh")
    add("--methods", nargs="+", choices=list(methods(8)), default=list(methods(8)), metavar="NAME")
    add("--microbatches", type=int, nargs="+", default=(1, 2, 4, 8), help="of a step, ascending")
    add("--experts", type=int, nargs="+", default=(8, 16, 32, 64), help="the first one is timed")
    add("--repeats", type=int, default=7, help="steps of each that count")
    add("--layers", type=int, default=4, help="model.num_layers, all of them routed")
    add("--width", type=int, default=128, help="model.d_model, a multiple of 64")
    add("--vocab", type=int, default=4096, help="model.vocab_size")
    add("--length", type=int, default=64, help="train.sequence_length")
    add("--microbatch", type=int, default=1, help="train.microbatch, sequences a rank")
    add("--output", type=Path, help="where the picture goes, .png or .svg; none without it")
    add("--quick", action="store_true", help="two points a series and two repeats")
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables, and write the picture."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.microbatches, options.experts, options.repeats = (1, 2), (8, 16), 2
    if options.output and options.output.suffix not in FORMATS:
        print(f"--output {options.output} is neither of {', '.join(FORMATS)}", file=sys.stderr)
        return 1
    prepare(options.devices)
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    start = time.perf_counter()
    try:
        with Progress(console=console, transient=True) as progress:
            results = measure(options, progress)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for table in tables(results):
        console.print(table)
    console.print(f"{note_on(options)}. Took {time.perf_counter() - start:.0f} s.")
    if options.output:
        draw(results, note_on(options)).savefig(options.output, dpi=80)
        console.print(f"picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
