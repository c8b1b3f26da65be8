"""What numbers look like to people."""

import pytest

from olmo_jax.formatting import amount, binary_bytes, columns, decimal_bytes, duration, seconds


@pytest.mark.parametrize(
    ("time", "text"),
    [(0.4, "0 s"), (59.7, "1 min 00 s"), (185.0, "3 min 05 s"), (3720.0, "1 h 02 min")],
)
def test_a_duration_is_read_at_a_glance(time: float, text: str) -> None:
    assert duration(time) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (23_516, "23.5 kB"), (2e9, "2 GB"), (3.5e12, "3.5 TB")]
)
def test_sizes_on_a_disk_have_three_digits(num_bytes: float, text: str) -> None:
    assert decimal_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(1023, "1023 B"), (1024, "1.00 KiB"), (80 * 2**30, "80.00 GiB")]
)
def test_memory_is_counted_in_powers_of_two(num_bytes: int, text: str) -> None:
    assert binary_bytes(num_bytes) == text


def test_amounts_and_short_times() -> None:
    assert [amount(n) for n in (7, 1500, 2.5e9)] == ["7", "1.5 k", "2.5 G"]
    assert [seconds(t) for t in (0.0031, 1.25)] == ["3.1 ms", "1.25 s"]


def test_the_first_and_the_last_column_stand_left_and_numbers_right() -> None:
    assert columns([("a", "1", "note"), ("long", "10", "")]) == ["a      1  note", "long  10"]
