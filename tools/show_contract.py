"""Print what a config's step does: collectives, loops, branches, scatters, donation and memory.

Usage: python tools/show_contract.py CONFIG [a.b=c ...]
One column each for 1, 2 and 4 microbatches (train.global_batch is set to give them). Nothing runs:
the step is traced and compiled for the config's mesh, emulated on the CPU if there is no GPU.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from olmo_jax.config_file import load
from olmo_jax.errors import UserError
from olmo_jax.formatting import binary_bytes
from olmo_jax.mesh.axes import DENSE_DATA_AXES, num_devices_wanted, resolve
from olmo_jax.runtime.environment import prepare

if TYPE_CHECKING:
    from olmo_jax.inspect import Contract

NUM_MICROBATCHES = (1, 2, 4)
MIN_WIDTH = 120
"""Columns of the output where it goes to a file or a narrow terminal."""

Rows = dict[str, list[str]]


def contract_table(contracts: Mapping[int, "Contract"], title: str) -> Table:
    """Return the table of one contract per number of microbatches."""
    table = Table(title=title, title_justify="left")
    table.add_column("per step and device", no_wrap=True)
    for num_microbatches in contracts:
        table.add_column(f"M = {num_microbatches}", justify="right")
    columns = list(contracts.values())
    for heading, section in _sections(columns).items():
        table.add_section()
        table.add_row(f"[bold]{heading}[/bold]")
        for label, cells in section.items():
            table.add_row(f"  {label}", *cells)
    return table


def _sections(columns: Sequence["Contract"]) -> dict[str, Rows]:
    return {
        "jaxpr: times, bytes sent by a ring": _by_label(columns, _traced_cells),
        "compiled: places (a loop of one iteration is gone)": _by_label(columns, _compiled_cells),
        "control flow": _by_label(columns, _control_cells),
        "work and memory": _by_label(columns, _size_cells),
    }


def _by_label(
    columns: Sequence["Contract"], cells_of: Callable[["Contract"], dict[str, str]]
) -> Rows:
    """Put the cells of all columns side by side; a label that a column lacks is a dash."""
    cells = [cells_of(column) for column in columns]
    labels = dict.fromkeys(label for column in cells for label in column)
    return {label: [column.get(label, "-") for column in cells] for label in labels}


def _place(in_loop: bool) -> str:
    return "in loop" if in_loop else "once   "


def _traced_cells(contract: "Contract") -> dict[str, str]:
    return {
        f"{_place(t.in_loop)} {t.kind} {t.dtype} over {' x '.join(t.axes)}": (
            f"{t.count} x, {binary_bytes(t.sent_bytes)}"
        )
        for t in contract.totals
    }


def _compiled_cells(contract: "Contract") -> dict[str, str]:
    return {
        f"{_place(in_loop)} {kind}": str(number)
        for in_loop in (False, True)
        for kind, number in contract.compiled_kinds(in_loop=in_loop).items()
    }


def _control_cells(contract: "Contract") -> dict[str, str]:
    lengths = [loop.length for loop in contract.loops]
    return {
        "trip counts of loops": " ".join(str(length or "?") for length in lengths) or "none",
        "loops without trip count": str(lengths.count(None)),
        "conditionals": str(contract.conditionals),
        "host callbacks": str(contract.callbacks),
        "float scatter-adds with repeated indices": str(contract.scatter_adds),
    }


def _size_cells(contract: "Contract") -> dict[str, str]:
    return {
        "FLOPs of matrix products": f"{contract.matmul_flops:.4g}",
        "donated": binary_bytes(sum(contract.donated.values())),
        **{f"memory: {name}": binary_bytes(value) for name, value in contract.memory.items()},
    }


def measure_columns(
    path: str, overrides: Sequence[str], sizes: Mapping[str, int]
) -> dict[int, "Contract"]:
    """Trace and compile the step for each number of microbatches."""
    # Not at the top: jax is imported after `prepare` has set what it reads.
    from olmo_jax.inspect import measure
    from olmo_jax.mesh.devices import build_mesh
    from olmo_jax.train.program import build

    mesh = build_mesh(sizes)
    rows = load(path, overrides).train.microbatch * math.prod(sizes[a] for a in DENSE_DATA_AXES)
    contracts = {}
    for number in NUM_MICROBATCHES:
        config = load(path, [*overrides, f"train.global_batch={number * rows}"])
        program = build(config, mesh)
        traced = program.jitted.trace(*program.abstract_arguments())
        contracts[number] = measure(traced, sizes)
    return contracts


def main(arguments: Sequence[str]) -> int:
    """Print the table of the config named first, with the overrides that follow."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    path, *overrides = arguments
    try:
        config = load(path, overrides)
        sizes = resolve(config.mesh, num_devices_wanted(config.mesh))
        prepare(math.prod(sizes.values()))
        contracts = measure_columns(path, overrides, sizes)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    title = f"{path} on {' x '.join(f'{k}={v}' for k, v in sizes.items() if v > 1) or '1 device'}"
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(contract_table(contracts, title))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
