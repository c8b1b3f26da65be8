"""Standard streams that are closed, gone or full, and characters that they lack."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_jax.runtime.streams import Unfailing, discard, printable

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CHECK = f"{sys.executable} -m olmo_jax.cli check"
VARIABLES = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env={**VARIABLES, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("config", "code"), [(QUICKSTART, 0), ("no.yaml", 1)])
def test_closed_streams_change_no_exit_code(closed: str, config: str, code: int) -> None:
    done = shell(f"{CHECK} {config} {closed}")
    assert done.returncode == code
    assert ("parameters" in done.stdout) == (code == 0 and closed in ("2>&-", "<&-"))
    assert ("no.yaml cannot be read" in done.stderr) == (code == 1 and closed in (">&-", "<&-"))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_one_message(unbuffered: str) -> None:
    done = shell(f"{CHECK} {QUICKSTART} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.startswith("olmo-jax: ")
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_an_output_without_the_character_prints_its_number(tmp_path: Path) -> None:
    config = tmp_path / "é.yaml"
    config.write_bytes(Path(QUICKSTART).read_bytes())
    done = shell(f"{CHECK} '{config}'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(rf"{tmp_path}/\xe9.yaml is valid")


def test_a_file_name_that_is_no_utf8_is_printed(tmp_path: Path) -> None:
    config = os.fsencode(tmp_path) + b"/\xff.yaml"
    Path(os.fsdecode(config)).write_bytes(Path(QUICKSTART).read_bytes())
    done = subprocess.run(
        [*CHECK.encode().split(), config], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rf"{tmp_path}/\udcff.yaml is valid".encode())


def test_who_cannot_be_written_to_falls_silent() -> None:
    with open("/dev/full", "w") as full:
        stream = Unfailing(full)
        for _ in range(2):
            assert stream.write("lost") == 4
            stream.flush()
        assert not full.isatty()


def test_what_is_discarded_raises_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        stream.write("lost")
        discard(stream)
        stream.flush()


def test_a_name_that_is_no_utf8_has_a_text() -> None:
    assert printable(Path("a/\udcff é")) == "a/\\udcff é"
