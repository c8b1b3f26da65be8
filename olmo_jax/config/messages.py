"""What a user reads about a single wrong key: what was given, the rule, what to write instead."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from olmo_jax.config.records import Config, Record

# What people call tensor parallelism in other trainers' configs, as a key or as a method.
TENSOR_NAMES = frozenset(
    {"tensor", "tensor_parallel", "tensor_parallelism", "tp", "tp_size", "tp_degree"}
)

_RULES = {
    "int_type": ("is not a whole number", "write an integer"),
    "float_type": ("is not a number", "write a number"),
    "finite_number": ("is not finite", "write a finite number"),
    "bool_type": ("is neither true nor false", "write true or false"),
    "string_type": ("is not text", "put it in quotes"),
    "string_unicode": ("has half of a surrogate pair", "write whole characters"),
    "string_pattern_mismatch": ("holds a null character", "leave it out"),
    "string_too_short": ("is empty", "write at least {min_length} character"),
    "tuple_type": ("is not a list", "write [a, b, ...]"),
    "too_short": ("has {actual_length} entries", "write {min_length} or more"),
    "too_long": ("has {actual_length} entries", "write {max_length}"),
    "greater_than_equal": ("is below {ge}", "use {ge} or more"),
    "greater_than": ("is not above {gt}", "use a number above {gt}"),
    "less_than": ("is not below {lt}", "use a number below {lt}"),
    "less_than_equal": ("is above {le}", "use {le} or less"),
}


def _plain(value: object) -> object:
    """Return `value` as YAML has it; what came from YAML has no tuples and stays as it is."""
    if isinstance(value, Record):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def show(value: object) -> str:
    """Return `value` as it would stand in an override."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def listing(choices: Sequence[object], last: str = "or") -> str:
    """Return "1, 2 or 4"."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def some(names: Sequence[object], most: int) -> str:
    """Return "a, b and 3 more": the first `most` of them and how many are left."""
    left = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {left} more" if left > 0 else "")


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def together(faults: Sequence[str]) -> str:
    """Join the messages of one config into one text."""
    if len(faults) == 1:
        return faults[0]
    return f"{len(faults)} faults in the config:\n" + "\n".join(f"  - {fault}" for fault in faults)


def record_in(annotation: object) -> type[Record] | None:
    """Return the record class inside a field's annotation, bare or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    found = (record_in(argument) for argument in get_args(annotation))
    return next((record for record in found if record is not None), None)


def known_keys(record: type[Record] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key below `record`, sections included."""
    for name, field in record.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Record):
            yield from known_keys(inner, f"{prefix}{name}.")


class _Place(NamedTuple):
    """Where a location ends: the dotted key's parts, the record that has the key, what it holds."""

    parts: list[str]
    holder: type[Record]
    inner: type[Record] | None


def _place(location: Sequence[str | int]) -> _Place:
    """Return what pydantic's location means.

    Pydantic appends the branch of a union, which is no key: only fields and list places count.
    """
    parts: list[str] = []
    holder: type[Record] = Config
    inner: type[Record] | None = Config
    for part in location:
        if isinstance(part, str):
            if inner is None:
                break
            holder = inner
            field = holder.model_fields.get(part)
            inner = record_in(field.annotation) if field else None
        parts.append(str(part))
    return _Place(parts, holder, inner)


def nearest_key(parts: Sequence[str], holder: type[Record]) -> str | None:
    """Return the known key that an unknown one most likely means, if any is near."""
    *prefix, name = parts
    if close := difflib.get_close_matches(name, holder.model_fields, n=1, cutoff=0.7):
        return ".".join([*prefix, close[0]])
    everywhere = list(known_keys())
    namesakes = [key for key in everywhere if key.rpartition(".")[2] == name]
    if namesakes:
        return namesakes[0]
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    close = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def no_tensor_parallelism(given: str) -> str:
    """Say why tensor parallelism is refused and what takes its place."""
    return (
        f"{given} asks for tensor parallelism, which olmo_jax does not have: its collectives "
        "inside each layer would fight expert parallelism for the fast links; drop it, and "
        "split experts with mesh.expert or the batch with mesh.data"
    )


def unknown_key(given: str, parts: Sequence[str], holder: type[Record]) -> str:
    """Refuse what was `given`: `holder` has no key like the last part; name the nearest one."""
    if parts[-1].lower() in TENSOR_NAMES:
        return no_tensor_parallelism(given)
    siblings = listing(list(holder.model_fields), "and")
    section = ".".join(parts[:-1]) or "the top level"
    nearest = nearest_key(parts, holder)
    if nearest is None:
        return f"{given} is not a known key; the keys of {section} are {siblings}"
    return f"{given} is not a known key; the nearest known key is {nearest}"


def _wrong_choice(value: object, expected: str) -> tuple[str, str]:
    choices = re.findall(r"'([^']*)'", expected)
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" (the nearest is {close[0]})" if close and len(choices) > 1 else ""
    return f"is not {listing(choices)}", f"use {listing(choices)}{hint}"


def _rule(error: ErrorDetails, inner: type[Record] | None) -> tuple[str, str]:
    """Return the rule that one pydantic error is about, and what to write instead."""
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "literal_error":
        return _wrong_choice(error["input"], context["expected"])
    if error["type"] == "model_type" and inner is not None:
        keys = listing(list(inner.model_fields), "and")
        return "is not a section of keys", f"write a mapping of some of {keys}"
    if error["type"] == "value_error":
        # A function of records.py raised it, with both parts in its text.
        rule, _, advice = str(context["error"]).partition("; ")
        return rule, advice
    if error["type"] not in _RULES:
        return f"is refused ({error['msg']})", "write a value that docs/configuration.md allows"
    rule, advice = _RULES[error["type"]]
    numbers = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
    return rule.format(**numbers), advice.format(**numbers)


def _fault(errors: Sequence[ErrorDetails]) -> str:
    """Return the message for all errors of one key (a union gives one a branch)."""
    error = errors[0]
    (parts, holder, inner), value = _place(error["loc"]), error["input"]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        return unknown_key(f"{key}={show(value)}", parts, holder)
    if error["type"] == "missing":
        above = ".".join(parts[:-1])
        lacking = f"entry {parts[-1]}" if parts[-1].isdecimal() else parts[-1]
        advice = "it" if parts[-1].isdecimal() else key
        return f"{above}={show(value)} lacks {lacking} and it has no default; add {advice}"
    if key == "parallel.method" and str(value).lower() in TENSOR_NAMES:
        return no_tensor_parallelism(f"{key}={show(value)}")
    rules, advice = zip(*(_rule(each, inner) for each in errors), strict=True)
    return f"{key}={show(value)} {' and '.join(rules)}; {', or '.join(advice)}"


def faults(error: ValidationError) -> list[str]:
    """Return one message for each wrong key, in the order of the records."""
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(tuple(_place(detail["loc"]).parts), []).append(detail)
    return [_fault(errors) for errors in by_key.values()]
