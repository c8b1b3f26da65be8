"""A run that is killed at random moments, in steps and in saves, ends as one that never was."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kill_runs.py"


@pytest.mark.matrix
def test_killed_runs_end_bit_for_bit_as_one_that_was_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six kills; `python tools/kill_runs.py FOLDER` does twenty."""
    spec = importlib.util.spec_from_file_location("kill_runs", TOOL)
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    code = tool.main([str(tmp_path / "runs"), "--kills", "6", "--steps", "40"])
    assert code == 0, capsys.readouterr().out
