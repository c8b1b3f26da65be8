"""Which weights decay: glob patterns on their dotted names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def decay_mask(names: Iterable[str], no_decay: Iterable[str]) -> dict[str, bool]:
    """Return for each dotted name whether it decays: none of the globs matches it."""
    patterns = tuple(no_decay)
    return {name: not any(fnmatchcase(name, pattern) for pattern in patterns) for name in names}
