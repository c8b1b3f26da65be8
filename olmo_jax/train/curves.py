"""report.png: a run's curves and its experts' load in one picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from olmo_jax.train.metrics import Line

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw loss, expert load, learning rate and gradient norm over the steps into a PNG.

    Expert load is a map of all experts if the run recorded their counts, else the busiest one's.
    """
    figure = Figure(figsize=(12, 7.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2)
    draw_loss(grid[0, 0], lines)
    if "expert_counts" in lines[-1]:
        # A run may have gone on with another train.record_expert_counts.
        draw_expert_map(grid[0, 1], [line for line in lines if "expert_counts" in line])
    else:
        draw_max_load(grid[0, 1], lines)
    draw_rate_and_norm(grid[1, 0], lines)
    draw_router_losses(grid[1, 1], lines)
    for axes in (grid[0, 0], grid[1, 0], grid[1, 1]):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    if assignment := lines[-1].get("assignment"):
        figure.suptitle(f"routing is not learned: assignment={assignment}")
    canvas.print_png(path)


def column(lines: Sequence[Line], name: str) -> np.ndarray:
    """Return one value of every line."""
    return np.array([line[name] for line in lines], float)


def marker(lines: Sequence[Line]) -> str:
    """Return a marker where a bare line would show nothing."""
    return "o" if len(lines) < 3 else ""


def draw_loss(axes: Axes, lines: Sequence[Line]) -> None:
    steps = column(lines, "step")
    loss = column(lines, "loss")
    axes.plot(steps, loss, color=BLUE, label="training", marker=marker(lines))
    evaluated = [line for line in lines if "eval_loss" in line]
    if evaluated:
        axes.plot(
            column(evaluated, "step"),
            column(evaluated, "eval_loss"),
            color=VERMILION,
            marker="o",
            linestyle="--",
            label="held out",
        )
    bad = [line["step"] for line in lines if line["skipped"]]
    if bad:
        axes.vlines(bad, 0, 1, transform=axes.get_xaxis_transform(), color=GREY, label="skipped")
    axes.set_title(f"cross entropy per token: {loss[0]:.3f} to {loss[-1]:.3f}")
    axes.set_ylabel("nats")
    axes.legend()


def draw_expert_map(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw each expert's share over the steps, the layers under each other; 1 is a fair share."""
    counts = np.array([line["expert_counts"] for line in lines], float)
    share = counts / np.maximum(counts.mean(axis=2, keepdims=True), 1e-9)
    num_steps, num_layers, num_experts = share.shape
    rows = share.transpose(1, 2, 0).reshape(num_layers * num_experts, num_steps)
    first, last = lines[0]["step"], lines[-1]["step"]
    image = axes.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        vmax=max(2.0, float(np.percentile(rows, 99))),
        extent=(first - 0.5, last + 0.5, num_layers * num_experts, 0),
    )
    middles = (np.arange(num_layers) + 0.5) * num_experts
    axes.set_yticks(middles, [f"{i}" for i in range(num_layers)])
    for border in range(1, num_layers):
        axes.axhline(border * num_experts, color="white", linewidth=1.5)
    axes.set_title(f"load of each of {num_experts} experts (1 = fair share)")
    axes.set_ylabel("routed layer")
    axes.set_xlabel("step")
    axes.figure.colorbar(image, ax=axes)


def draw_max_load(axes: Axes, lines: Sequence[Line]) -> None:
    steps = column(lines, "step")
    axes.plot(steps, column(lines, "max_load"), color=ORANGE, marker=marker(lines))
    axes.axhline(1, color=GREY, linestyle=":")
    axes.set_title("busiest expert over the mean, worst layer")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)


def draw_rate_and_norm(axes: Axes, lines: Sequence[Line]) -> None:
    steps = column(lines, "step")
    norm = axes.plot(
        steps, column(lines, "grad_norm"), color=GREEN, label="gradient norm", marker=marker(lines)
    )
    axes.set_yscale("log")
    axes.set_ylabel("gradient norm, before clipping")
    right = axes.twinx()
    rate = right.plot(
        steps, column(lines, "lr"), color=VERMILION, linestyle="--", label="learning rate"
    )
    right.set_ylabel("learning rate")
    right.set_ylim(bottom=0)
    axes.set_title("gradient norm and learning rate")
    axes.legend(handles=[*norm, *rate], loc="upper right")


def draw_router_losses(axes: Axes, lines: Sequence[Line]) -> None:
    steps = column(lines, "step")
    for name, label, color, style in (
        ("balance_loss", "balance loss (1 = balanced)", BLUE, "-"),
        ("router_z_loss", "router z-loss", ORANGE, "--"),
        ("drop_rate", "dropped routes, share", VERMILION, ":"),
    ):
        axes.plot(
            steps,
            column(lines, name),
            color=color,
            linestyle=style,
            label=label,
            marker=marker(lines),
        )
    axes.set_title("router")
    axes.set_ylim(bottom=0)
    axes.legend()
