"""Ends a job in which no step finishes any more, and says which rank hangs and where."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax

from olmo_jax.config.messages import listing
from olmo_jax.runtime.connection import PREFIX, client, is_connected

HUNG = 124
"""The exit code of a process whose watchdog ended it; timeout(1) uses the same."""

MAX_INTERVAL_S = 5.0
READING_LIMIT_S = 20.0
# A thread that holds the interpreter's lock for ever keeps the watchdog from running: then
# faulthandler, which needs no lock, dumps the stacks and exits with 1.
BACKSTOP_S = 120.0
MAX_LISTED = 8
JAX = str(Path(jax.__file__).parent) + os.sep

T = TypeVar("T")


class Progress(NamedTuple):
    """How far a rank is. All ranks pass the same events, so who has fewest is behind."""

    events: int = 0
    step: int = 0
    phase: str = "starting"
    where: str = ""
    waits: bool = False
    ticks: int = 0
    gave_up: bool = False


class Limit(NamedTuple):
    """Seconds, and the config's key that says so."""

    key: str
    seconds: float


@runtime_checkable
class Board(Protocol):
    """Where each rank shows its progress to the others."""

    def publish(self, rank: int, progress: Progress) -> None: ...

    def read(self) -> dict[int, Progress]: ...


class SharedBoard:
    """Progress in the coordination service.

    It lives in threads of process 0 that answer while its Python hangs, needs no file system that
    all nodes share, and forgets with the job. If it does not answer, process 0 is what hangs.
    """

    FOLDER = f"{PREFIX}/progress/"

    def publish(self, rank: int, progress: Progress) -> None:
        text = json.dumps(progress)
        client().key_value_set(f"{self.FOLDER}{rank}", text, allow_overwrite=True)

    def read(self) -> dict[int, Progress]:
        found = client().key_value_dir_get(self.FOLDER)
        return {int(key.rpartition("/")[2]): Progress(*json.loads(text)) for key, text in found}


class OwnBoard:
    """Progress of a process that is alone."""

    def __init__(self) -> None:
        self._shown: dict[int, Progress] = {}

    def publish(self, rank: int, progress: Progress) -> None:
        self._shown[rank] = progress

    def read(self) -> dict[int, Progress]:
        return dict(self._shown)


class Watchdog:
    """While open, ends the process with code 124 when it makes no progress for too long.

    The limit is `first_limit_s` until the first `beat`, then `limit_s`; each `beat` and `phase`
    starts it anew. Before the end the stacks of all threads go to stderr and to
    `run_dir/logs/stacks_rank_N.txt`, and the rank that hangs is named.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        num_ranks: int,
        first_limit_s: float,
        limit_s: float,
        *,
        board: Board | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._stacks = stacks_file(run_dir, rank)
        self._limit = Limit("train.first_step_timeout_s", first_limit_s)
        self._later_limit = Limit("train.step_timeout_s", limit_s)
        self._interval_s = min(MAX_INTERVAL_S, first_limit_s / 10, limit_s / 10)
        self._board = board or (SharedBoard() if is_connected() else OwnBoard())
        self._watched = threading.get_ident()
        self._progress = Progress()
        self._ticks = 0
        self.deadline = time.monotonic() + first_limit_s
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True, name=f"watchdog: {name}")
            for work, name in ((self._watch, "watch"), (self._publish_always, "publish"))
        ]

    def __enter__(self) -> "Watchdog":
        self._progress = self._progress._replace(where=self._place()[0])
        self._renew()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * self._interval_s)
        faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int) -> None:
        """Note that `step` has finished. All ranks call it for the same steps."""
        self._limit = self._later_limit
        self._note(step, f"after step {step}")

    def phase(self, name: str) -> None:
        """Note that something begins which may take as long as a step, as `saving step 12`."""
        self._note(self._progress.step, name)

    def _note(self, step: int, phase: str) -> None:
        events = self._progress.events + 1
        self._progress = Progress(events, step, phase)
        self._renew()

    def _renew(self) -> None:
        self.deadline = time.monotonic() + self._limit.seconds

    def _publish_always(self) -> None:
        """Show this rank's progress now and then, in a thread of its own: it may wait for ever."""
        while True:
            # What process 0 cannot be told now may be told at the next turn.
            with suppress(jax.errors.JaxRuntimeError):
                self._publish()
            if self._closed.wait(self._interval_s):
                return

    def _publish(self, *, gave_up: bool = False) -> None:
        where, waits = self._place()
        self._ticks += 1
        self._board.publish(
            self.rank,
            self._progress._replace(where=where, waits=waits, ticks=self._ticks, gave_up=gave_up),
        )

    def _place(self) -> tuple[str, bool]:
        frame = sys._current_frames().get(self._watched)
        return (place(frame), waits_for_devices(frame)) if frame else ("ended", False)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            left = self.deadline - time.monotonic()
            if left <= 0:
                self._give_up()
            else:
                faulthandler.dump_traceback_later(left + BACKSTOP_S, exit=True, file=2)

    def _give_up(self) -> None:
        limit, phase = self._limit, self._progress.phase
        faulthandler.dump_traceback_later(BACKSTOP_S, exit=True, file=2)
        _write(
            f"\nolmo-jax: rank {self.rank}: nothing finished within {limit.key}="
            f"{limit.seconds:g} s in '{phase}'; the stacks of all threads:\n"
        )
        faulthandler.dump_traceback(file=2)
        # A file system, too, may be what hangs.
        within(MAX_INTERVAL_S, self._save_stacks)
        _write(f"olmo-jax: {self._verdict()}\n")
        if self.rank == 0 and self.num_ranks > 1:
            # The board ends with this process, and jax aborts those that are still reading it.
            time.sleep(5 * self._interval_s + 1)
        os._exit(HUNG)

    def _save_stacks(self) -> None:
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        with self._stacks.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file=file)

    def _verdict(self) -> str:
        """Look at all ranks twice: one that shows the same tick again has stopped altogether."""

        def look() -> tuple[dict[int, Progress], dict[int, Progress]]:
            self._publish(gave_up=True)
            # Others show what they do every so often; the last of it must be there.
            time.sleep(2 * self._interval_s)
            first = self._board.read()
            time.sleep(max(3 * self._interval_s, 1.0))
            return first, self._board.read()

        seen = within(READING_LIMIT_S + 5 * self._interval_s, look)
        if seen is None:
            return (
                "rank 0, where the ranks show their progress, does not answer; rank 0 hangs, or "
                "its host cannot be reached"
            )
        return verdict(*seen, num_ranks=self.num_ranks)


def verdict(first: Mapping[int, Progress], then: Mapping[int, Progress], *, num_ranks: int) -> str:
    """Return which ranks hang, from two looks at the progress of all.

    In this order: ranks that never came, ranks whose process does not run, ranks that have passed
    fewer events, ranks that do not wait for their devices while others do.
    """
    # A collective waits for its last rank, so when one rank hangs all of them stop. Each test names
    # the ranks that the others wait for, and is only sure if the tests before it found none.
    #
    #     rank    events  ticks, twice   waits for devices
    #     0       41      7, 9           yes
    #     1       41      7, 7           -        frozen: even its publishing thread has stopped
    #     2       40      7, 9           yes      behind: the others have passed an event more
    #     3       41      7, 9           no       busy: in Python, and the others in a collective
    absent = [rank for rank in range(num_ranks) if rank not in then]
    if absent:
        return f"{_ranks(absent)} never came as far as training"
    # A rank that gave up may have ended between the two looks: no ticks more, and not frozen.
    frozen = [
        rank
        for rank, progress in then.items()
        if not progress.gave_up and rank in first and progress.ticks == first[rank].ticks
    ]
    if frozen:
        return (
            f"{_hang(frozen)}: the process is stopped or gone; it showed: {_states(frozen, then)}"
        )
    most = max(progress.events for progress in then.values())
    behind = [rank for rank, progress in then.items() if progress.events < most]
    if behind:
        ahead = next(progress for progress in then.values() if progress.events == most)
        others = f"others have come to '{ahead.phase}'"
        return f"{_hang(behind)}: {_states(behind, then)}; {others}"
    busy = [rank for rank, progress in then.items() if not progress.waits]
    if num_ranks == 1:
        return f"{_hang([0])}: {_states([0], then)}"
    if busy and len(busy) < num_ranks:
        return f"{_hang(busy)}: {_states(busy, then)}; the others wait for their devices"
    return (
        f"all {num_ranks} ranks are equally far, last step {then[0].step}, now in "
        f"'{then[0].phase}': {_places(then)}; a device, or the network between devices, hangs, or "
        "the first of these"
    )


def _places(seen: Mapping[int, Progress]) -> str:
    """Return which ranks are where, first where fewest are."""
    by_place: dict[str, list[int]] = {}
    for rank, progress in seen.items():
        by_place.setdefault(progress.where, []).append(rank)
    groups = sorted(by_place.items(), key=lambda group: len(group[1]))[:MAX_LISTED]
    return "; ".join(f"{_ranks(ranks)} at {where}" for where, ranks in groups)


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)[:MAX_LISTED]]
    if len(ranks) > MAX_LISTED:
        return f"ranks {', '.join(shown)} and {len(ranks) - MAX_LISTED} more"
    return f"rank{'s' if len(shown) > 1 else ''} {listing(shown, 'and')}"


def _hang(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} hang{'s' if len(ranks) == 1 else ''}"


def _states(ranks: Sequence[int], seen: Mapping[int, Progress]) -> str:
    """Return what the first of `ranks` does; the others have their own logs."""
    progress = seen[min(ranks)]
    return f"last step {progress.step}, now in '{progress.phase}' at {progress.where}"


def place(frame: FrameType) -> str:
    """Return the innermost call and, if it is not ours, our own one that leads there."""
    here = _call(frame)
    own = next((f for f in _outwards(frame) if "/olmo_jax/" in f.f_code.co_filename), None)
    return here if own is None or own is frame else f"{here}, called from {_call(own)}"


def waits_for_devices(frame: FrameType) -> bool:
    """Say whether the innermost call is one of jax's own, as that of jax.device_get."""
    return frame.f_code.co_filename.startswith(JAX)


def _outwards(frame: FrameType | None) -> Sequence[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _call(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"


def within(limit_s: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns, or None if it takes longer or fails."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def stacks_file(run_dir: str | Path, rank: int) -> Path:
    """Return where a rank's stacks are kept."""
    return Path(run_dir) / "logs" / f"stacks_rank_{rank}.txt"


def _write(text: str) -> None:
    # Not print: a thread that hangs may hold the stream.
    os.write(2, text.encode())
