"""YAML as configs use it: 1.2 scalars, a key only once, errors with their line."""

import re
from collections.abc import Callable
from typing import Any

import yaml

from olmo_jax.errors import UserError

DEEPEST = 16
"""The most lists and mappings inside each other; a config needs five."""

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
    yaml_constructors = {}  # noqa: RUF012

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        _refuse_deep(node)
        return node


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that either version of YAML would take for something else."""


def _fault(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _words(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return node.value
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _refuse_deep(root: yaml.Node | None) -> None:
    """Refuse what is deeper than any config, and what holds itself by an alias: it has no end."""
    level = {} if root is None else {id(root): root}
    for _ in range(DEEPEST):
        level = {id(child): child for node in level.values() for child in _children(node)}
    if level:
        raise _fault(
            f"it has more than {DEEPEST} lists and mappings inside each other, or holds itself by "
            "an alias; write it out, and no deeper",
            next(iter(level.values())),
        )


def _scalar(kind: str) -> Callable[[_Loader, yaml.Node], Any]:
    """Return the constructor of a scalar: a tag that is written out must suit its text."""
    pattern = {name: pattern for name, pattern, _ in _SCALARS}[kind]

    def construct(loader: _Loader, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode) or not pattern.match(node.value):
            raise _fault(
                f"{_words(node)} has the tag !!{kind} and is no such value; drop the tag", node
            )
        return _READ[kind](node.value)

    return construct


def _read_float(text: str) -> float | int:
    """Return 1e4 as an integer, so that a count can be written so; a float takes it too."""
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return int(value) if "e" in text.lower() and value.is_integer() else value


_READ: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": _read_float,
    "null": lambda text: None,
}


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    known = ", ".join(f"!!{name}" for name in (*_READ, "str", "seq", "map"))
    tag = node.tag.replace(_TAG, "!!")
    raise _fault(f"the tag {tag} is none of {known}; drop the tag", node)


def _construct_sequence(loader: _Loader, node: yaml.Node) -> list[Any]:
    if not isinstance(node, yaml.SequenceNode):
        raise _fault(f"{_words(node)} has the tag !!seq and is no list; drop the tag", node)
    return loader.construct_sequence(node, deep=True)


def _construct_mapping(loader: _Loader, node: yaml.Node) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _fault(f"{_words(node)} has the tag !!map and is no mapping; drop the tag", node)
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            problem = f"a key is {_words(key_node)}, and keys are text; write `key: value`"
            raise _fault(problem, key_node)
        key, line = key_node.value, key_node.start_mark.line + 1
        if key in lines:
            problem = f"the key {key} stands on line {lines[key]} already; keep one of the two"
            raise _fault(problem, key_node)
        lines[key] = line
    loader.flatten_mapping(node)
    return {str(key.value): loader.construct_object(value, deep=True) for key, value in node.value}


for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
for _name in _READ:
    _Loader.add_constructor(_TAG + _name, _scalar(_name))
_Loader.add_constructor(_TAG + "str", _Loader.construct_scalar)
_Loader.add_constructor(_TAG + "seq", _construct_sequence)
_Loader.add_constructor(_TAG + "map", _construct_mapping)
_Loader.yaml_constructors[None] = _refuse_tag
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
    except RecursionError:
        raise UserError(
            f"{name} is not a config: it has hundreds of lists and mappings inside each other, and "
            f"may have {DEEPEST}; write fewer"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name} is not YAML: {error}") from None


def dump(value: Any) -> str:
    """Return YAML that `parse` reads back to `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
