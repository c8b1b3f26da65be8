"""Which weights decay: glob patterns on their dotted names. No jax here, so `check` may ask."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def decay_mask(names: Iterable[str], no_decay: Iterable[str]) -> dict[str, bool]:
    """Return for each dotted name whether it decays: none of the globs matches it."""
    patterns = tuple(no_decay)
    return {name: not any(fnmatchcase(name, pattern) for pattern in patterns) for name in names}


def unmatched_patterns(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match none of `names`: most likely misspelt."""
    known = tuple(names)
    return [
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)
    ]
