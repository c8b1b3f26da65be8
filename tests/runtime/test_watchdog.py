"""Whom the watchdog names, and that it ends a process. Real ranks hang in test_local.py."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from olmo_jax.runtime import watchdog
from olmo_jax.runtime.watchdog import HUNG, Progress, Watchdog, stacks_file, verdict

WAITING = Progress(7, 3, "step 4", "jax/array.py:1 wait", waits=True, ticks=5)
AHEAD = WAITING._replace(events=8, step=4, phase="after step 4", ticks=6)
SLEEPING = Progress(7, 3, "step 4", "train/loop.py:7 run", waits=False, ticks=5)


def looks(*then: Progress) -> str:
    """Return the verdict on ranks that all went on ticking between the two looks."""
    first = {rank: progress._replace(ticks=0) for rank, progress in enumerate(then)}
    return verdict(first, dict(enumerate(then)), num_ranks=len(then))


def test_the_rank_that_has_passed_fewer_events_hangs() -> None:
    said = looks(AHEAD, WAITING, AHEAD)
    assert said.startswith("rank 1 hangs: last step 3, now in 'step 4' at jax/array.py:1 wait;")
    assert "others have come to 'after step 4'" in said


def test_of_ranks_equally_far_the_one_that_does_not_wait_for_devices_hangs() -> None:
    said = looks(WAITING, WAITING, SLEEPING)
    assert said.startswith("rank 2 hangs: last step 3, now in 'step 4' at train/loop.py:7 run")


def test_a_process_that_does_not_run_hangs_whatever_it_showed_last() -> None:
    then = {0: WAITING._replace(ticks=9), 1: AHEAD, 2: WAITING._replace(gave_up=True)}
    first = {0: WAITING, 1: AHEAD, 2: then[2]}
    assert verdict(first, then, num_ranks=3).startswith("rank 1 hangs: the process is stopped")


def test_ranks_that_never_came_are_named() -> None:
    said = verdict({1: WAITING}, {1: WAITING}, num_ranks=4)
    assert said == "ranks 0, 2 and 3 never came as far as training"


def test_nobody_is_named_if_all_wait_for_devices() -> None:
    said = looks(WAITING, WAITING)
    assert said.startswith("all 2 ranks are equally far")
    assert "a device, or the network between devices, hangs" in said


def test_ranks_equally_far_are_told_apart_by_where_they_are() -> None:
    said = looks(SLEEPING, SLEEPING._replace(where="data/rows.py:9 next"), SLEEPING)
    assert "rank 1 at data/rows.py:9 next; ranks 0 and 2 at train/loop.py:7 run" in said


def test_many_ranks_make_no_long_line() -> None:
    said = looks(*[WAITING] * 1000, AHEAD)
    assert said.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more hang: last step 3")


def run(code: str) -> subprocess.CompletedProcess[str]:
    given = "import time; from olmo_jax.runtime.watchdog import Watchdog\n" + code
    return subprocess.run(
        [sys.executable, "-c", given], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_process_that_hangs_ends_with_its_stacks(tmp_path: Path) -> None:
    done = run(
        f"with Watchdog({str(tmp_path)!r}, 0, 1, 60.0, 0.2) as dog:\n"
        "    dog.beat(1)\n"
        "    dog.phase('saving step 1')\n"
        "    time.sleep(1000)"
    )
    assert done.returncode == HUNG, done.stderr
    assert "nothing finished within train.step_timeout_s=0.2 s in 'saving step 1'" in done.stderr
    assert 'File "<string>", line 5 in <module>' in done.stderr
    assert "olmo-jax: rank 0 hangs: last step 1, now in 'saving step 1' at" in done.stderr
    stacks = (tmp_path / "logs" / "stacks_rank_0.txt").read_text()
    assert 'File "<string>", line 5 in <module>' in stacks


def test_a_watchdog_that_is_closed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    monkeypatch.setattr(Watchdog, "_give_up", lambda _: ended.append(True))
    with Watchdog(tmp_path, 0, 1, 30.0, 0.2):
        pass
    with Watchdog(tmp_path, 0, 1, 30.0, 0.2) as dog:
        dog.beat(1)
    time.sleep(0.4)
    assert not ended


def test_each_beat_and_phase_starts_the_limit_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    dog = Watchdog(tmp_path, 0, 1, 100.0, 10.0)
    assert dog.deadline == 100
    now = 50.0
    dog.phase("compiling")
    assert dog.deadline == 150
    now = 60.0
    dog.beat(1)
    assert dog.deadline == 70
    now = 65.0
    dog.phase("saving step 1")
    assert dog.deadline == 75


def test_stacks_are_kept_in_the_run_folder() -> None:
    assert str(stacks_file("runs/a", 3)) == "runs/a/logs/stacks_rank_3.txt"
