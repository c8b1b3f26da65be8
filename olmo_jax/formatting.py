"""Numbers as people read them: bytes, amounts, times, aligned columns."""

from collections.abc import Sequence

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def binary_bytes(number: int | float) -> str:
    """Return bytes as "1.25 GiB", in the largest unit that leaves at least one."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:.0f} B"


def decimal_bytes(number: int | float) -> str:
    """Return bytes as "1.25 MB", with three digits: what a disk's maker counts in."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def amount(number: int | float) -> str:
    """Return "1.25 M": three digits and a power of a thousand."""
    for size, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:g}"


def seconds(number: int | float) -> str:
    """Return a time as "1.25 s" or "3.1 ms"."""
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.3g} ms"


def duration(seconds: float) -> str:
    """Return "1 h 02 min", "3 min 05 s" or "12 s"."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows with their cells aligned: the first `left` ones and the last to the left."""
    last = len(rows[0]) - 1
    widths = [max(len(row[i]) for row in rows) for i in range(last + 1)]
    return [
        "  ".join(
            cell.ljust(width) if i < left or i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
