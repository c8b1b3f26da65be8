"""YAML as configs use it: 1.2 scalars, a key only once, errors with their line."""

import re
from typing import Any

import yaml

from olmo_jax.errors import UserError

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_SCALARS = (
    ("bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
)


class _Loader(yaml.SafeLoader):
    """PyYAML reads 1.1, where 3e-4 is text, 010 is eight, 1:30 is ninety and `no` is false."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that either version of YAML would take for something else."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    """Return 1e4 as an integer, so that a count can be written so; a float takes it too."""
    value = loader.construct_yaml_float(node)
    return int(value) if "e" in node.value.lower() and value.is_integer() else value


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        key, mark = str(key_node.value), key_node.start_mark
        if key in lines:
            problem = f"the key {key} stands on line {lines[key]} already; keep one of the two"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        lines[key] = mark.line + 1
    loader.flatten_mapping(node)
    return {str(key.value): loader.construct_object(value, deep=True) for key, value in node.value}


for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
_Loader.add_constructor(_TAG + "int", _construct_int)
_Loader.add_constructor(_TAG + "float", _construct_float)
_Loader.add_constructor(_TAG + "map", _construct_mapping)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def parse(text: str, name: str) -> Any:
    """Return the value that YAML `text` stands for.

    Raises: UserError with `name` and the line of the fault.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{name}{where} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name} is not YAML: {error}") from None


def dump(value: Any) -> str:
    """Return YAML that `parse` reads back to `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
