"""Draw a pipeline schedule: a row per rank, with its bubble and its peak of live activations.

python tools/draw_schedule.py interleaved --ranks 4 --chunks 2 --microbatches 8 --output out.png
Time goes to the right; a forward is 1 wide, a backward 2. Numbers are microbatches.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from olmo_jax.errors import UserError
from olmo_jax.parallel.pipeline import (
    SCHEDULES,
    Schedule,
    bubble,
    peak_live,
    stages_of,
    timeline,
    validate,
)
from olmo_jax.parallel.pipeline.timeline import BACKWARD_UNITS, FORWARD_UNITS

FORMATS = (".png", ".svg")
UNIT_INCHES = 0.24
MAX_INCHES = 60
"""A longer drawing gets narrower units, and no numbers once they would not fit."""
ROW_INCHES = 0.42
MARGIN_INCHES = 2.6
MIN_NUMBER_POINTS = 3.5

HUES = ("Blues", "Oranges", "Greens", "Purples", "Reds", "Greys")
"""One per chunk, and again from the first: the forward is light, the backward dark."""


def colour(kind: str, chunk: int) -> str:
    return to_hex(mpl.colormaps[HUES[chunk % len(HUES)]](0.35 if kind == "F" else 0.75))


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def draw(schedule: Schedule) -> Figure:
    """Return the drawing of a schedule."""
    length = timeline(schedule).length
    unit_inches = min(UNIT_INCHES, MAX_INCHES / length)
    width = length * unit_inches + MARGIN_INCHES
    figure = Figure(figsize=(width, schedule.ranks * ROW_INCHES + 1.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, length), ylim=(schedule.ranks - 0.5, -0.5), xlabel="time (forwards)")
    axes.set_facecolor("0.93")
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.tick_params(left=False)
    _draw_ops(axes, schedule, number_points=min(8.0, 72 * unit_inches / 2))
    _draw_margin(axes, schedule)
    figure.suptitle(_title(schedule), fontsize=10)
    handles = [
        Patch(color=colour(kind, chunk), label=f"{word}, chunk {chunk}")
        for chunk in range(schedule.chunks)
        for kind, word in (("F", "forward"), ("B", "backward"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _title(schedule: Schedule) -> str:
    idle = bubble(schedule)
    counts = f"P={schedule.ranks}, chunks {schedule.chunks}, M={schedule.microbatches}"
    return f"{schedule.name}: {counts}\nbubble {idle} = {percent(float(idle))}"


def _draw_ops(axes: Axes, schedule: Schedule, number_points: float) -> None:
    times = timeline(schedule)
    stages = stages_of(schedule.ranks, schedule.chunks)
    for (rank, chunk), stage in np.ndenumerate(stages):
        for microbatch in range(schedule.microbatches):
            for kind, starts in (("F", times.forward), ("B", times.backward)):
                box = _draw_box(axes, kind, int(starts[stage, microbatch]), rank, chunk)
                if number_points >= MIN_NUMBER_POINTS:
                    _draw_number(axes, microbatch, box, number_points, kind)


def _draw_box(axes: Axes, kind: str, start: int, rank: int, chunk: int) -> Rectangle:
    units = FORWARD_UNITS if kind == "F" else BACKWARD_UNITS
    box = Rectangle((start, rank - 0.4), units, 0.8, fc=colour(kind, chunk), ec="white", lw=0.5)
    axes.add_patch(box)
    return box


def _draw_number(axes: Axes, number: int, box: Rectangle, points: float, kind: str) -> None:
    ink = "black" if kind == "F" else "white"
    x, y = box.get_center()
    axes.text(x, y, str(number), ha="center", va="center", fontsize=points, color=ink)


def _draw_margin(axes: Axes, schedule: Schedule) -> None:
    idle = percent(float(bubble(schedule)))
    margin = axes.secondary_yaxis("right")
    margin.set_yticks(
        range(schedule.ranks),
        [f"bubble {idle}, peak {peak} live" for peak in peak_live(schedule).tolist()],
    )
    margin.tick_params(right=False)


def save(schedule: Schedule, outputs: Sequence[Path]) -> None:
    """Write the drawing to each file, byte for byte the same for the same schedule."""
    mpl.rcParams["svg.hashsalt"] = schedule.name
    for output in outputs:
        metadata = {"Date": None} if output.suffix == ".svg" else None
        # A second save of one figure would move things: the layout starts from the last one.
        draw(schedule).savefig(output, dpi=150, metadata=metadata)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schedule", choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=1, help="per rank (default: 1)")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument(
        "--output", type=Path, nargs="+", required=True, help="files that end in .png or .svg"
    )
    given = parser.parse_args(arguments)
    for output in given.output:
        if output.suffix not in FORMATS:
            parser.error(f"--output {output} must end in {' or '.join(FORMATS)}")
    return given


def run(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    try:
        schedule = SCHEDULES[given.schedule](given.ranks, given.chunks, given.microbatches)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    save(validate(schedule), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
