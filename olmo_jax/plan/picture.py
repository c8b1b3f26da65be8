"""A plan as a picture: memory by category, time by term, bytes by method."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_jax.formatting import GIB
from olmo_jax.plan.plan import Plan


def draw(plan: Plan, title: str) -> Figure:
    """Return the picture of a plan."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    held, taken, sent = figure.subplots(1, 3)
    parts = {name: number for name, number in plan.memory_bytes.items() if name != "total"}
    _bars(held, {name: number / GIB for name, number in parts.items()}, "GiB")
    held.axvline(plan.hardware.usable_bytes / GIB, color="tab:red", linestyle="--")
    verdict = "fits" if plan.fits else "does not fit"
    total = plan.memory_bytes["total"] / GIB
    held.set_title(f"memory of a rank: {total:.1f} GiB, {verdict}")
    _bars(taken, plan.terms, "s")
    taken.set_title(f"a step: {plan.step_time_s:.2f} s, MFU {plan.mfu:.1%}")
    by_method = {row.method: row.step_bytes / GIB for row in plan.methods if row.used}
    _bars(sent, by_method, "GiB")
    sent.set_title("sent by a rank in a step")
    figure.suptitle(title, fontsize="small")
    return figure


def _bars(axes: Axes, values: dict[str, float], unit: str) -> None:
    """Draw what is not zero, in order from the top, with the numbers."""
    shown = {name: value for name, value in values.items() if value > 0}
    bars = axes.barh(list(shown), list(shown.values()), color="tab:blue")
    axes.bar_label(bars, fmt="{:.3g}", padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(unit)
