"""The picture of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_jax.train.curves import draw, draw_expert_map, draw_loss, marker

PNG = b"\x89PNG\r\n\x1a\n"


def lines_of(num: int, *, counts: bool = True, **special: Any) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [
        {
            "step": step,
            "loss": 8.3 * 0.99**step,
            "balance_loss": 1.1,
            "router_z_loss": 0.4,
            "grad_norm": 1.0 + 1 / step,
            "lr": 1e-3,
            "skipped": 0,
            "drop_rate": 0.01,
            "max_load": 1.4,
            **({"eval_loss": 8.0} if step % 5 == 0 else {}),
            **({"expert_counts": generator.integers(1, 9, (3, 8)).tolist()} if counts else {}),
            **special,
        }
        for step in range(1, num + 1)
    ]


def axes() -> Axes:
    return Figure().subplots()


@pytest.mark.parametrize("num", [1, 2, 12])
@pytest.mark.parametrize("counts", [True, False])
def test_a_run_of_any_length_gives_a_picture(tmp_path: Path, num: int, counts: bool) -> None:
    path = tmp_path / "report.png"
    draw(lines_of(num, counts=counts), path)
    data = path.read_bytes()
    assert data.startswith(PNG)
    assert len(data) > 20_000


def test_a_run_that_recorded_counts_only_at_its_end_gives_a_picture(tmp_path: Path) -> None:
    lines = [*lines_of(3, counts=False), *lines_of(6)[3:]]
    draw(lines, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_steps_without_a_finite_loss_leave_a_gap_and_a_mark(tmp_path: Path) -> None:
    lines = lines_of(12)
    lines[3] |= {"loss": float("nan"), "grad_norm": float("nan"), "skipped": 1}
    draw(lines, tmp_path / "report.png")
    panel = axes()
    draw_loss(panel, lines)
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {
        "training",
        "held out",
        "skipped",
    }


def test_expert_load_is_relative_to_a_fair_share() -> None:
    panel = axes()
    counts = [[[6, 2, 0, 0]], [[5, 5, 5, 5]]]
    draw_expert_map(panel, [{"step": i, "expert_counts": c} for i, c in enumerate(counts, 1)])
    shown = np.asarray(panel.images[0].get_array())
    np.testing.assert_allclose(shown, [[3, 1], [1, 1], [0, 1], [0, 1]])


def test_a_single_step_is_drawn_as_a_point() -> None:
    assert marker(lines_of(1)) == "o"
    assert marker(lines_of(9)) == ""
