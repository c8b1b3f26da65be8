"""README and docs against the code: keys and defaults, command lines, links."""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from olmo_jax.arguments import parse
from olmo_jax.config import document
from olmo_jax.config.messages import record_in, show
from olmo_jax.config.records import Config, Record

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "docs" / "configuration.md"
FRONT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES = [*FRONT, *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = "mesh|parallel|model|optim|data|train|checkpoint"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fields_below(record: type[Record], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key that holds a value, lists of records and their keys both."""
    for name, field in record.model_fields.items():
        inner = record_in(field.annotation)
        is_section = isinstance(field.annotation, type) and inner is not None
        if not is_section:
            yield prefix + name, field
        if inner is not None:
            is_list = get_origin(field.annotation) is tuple
            yield from fields_below(inner, f"{prefix}{name}{'[].' if is_list else '.'}")


FIELDS = dict(fields_below(Config))


def rows_of_keys() -> dict[str, list[str]]:
    """Return the cells after the key of each table row that begins with a key in backticks."""
    rows: dict[str, list[str]] = {}
    for line in CONFIGURATION.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| `([\w.\[\]]+)` \|", line)
        if found and ("." in found[1] or found[1] in Config.model_fields):
            assert found[1] not in rows, f"{found[1]} has two rows"
            rows[found[1]] = [cell.strip() for cell in line.split(" | ")[1:]]
    return rows


def choices(annotation: Any) -> Iterator[str]:
    """Yield the words that a key may have, inside a union or not."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for argument in get_args(annotation):
            yield from choices(argument)


def fenced(page: Path, *languages: str) -> Iterator[str]:
    """Yield the fenced blocks of a page that are marked as one of `languages`."""
    text = page.read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every olmo-jax command in fenced code, a prompt and a path aside."""
    for body in fenced(page, "", "console", "bash", "sh"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "olmo-jax " in line else []
            words = words[1:] if words[:1] == ["$"] else words
            if words and words[0].rpartition("/")[2] == "olmo-jax":
                yield words[1:]


def outside_of_code(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what a link may name after #: headings in lower case, spaces as dashes."""
    headings = re.findall(r"^#+ (.+)$", outside_of_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_has_every_key_and_no_other() -> None:
    assert set(rows_of_keys()) == set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_the_page_has_the_default_and_the_choices_of_a_key(key: str) -> None:
    kind, default, *_ = rows_of_keys()[key]
    field = FIELDS[key]
    assert default == ("required" if field.is_required() else f"`{show(field.default)}`")
    assert set(re.findall(r"`([^`]+)`", kind)) == set(choices(field.annotation))


@every_page
def test_a_key_that_a_page_names_exists(page: Path) -> None:
    known = {key.partition("[")[0] for key in FIELDS}
    known |= {".".join(key.split(".")[:n]) for key in FIELDS for n in range(1, 4)}
    quoted = re.findall(r"`([^`]+)`", outside_of_code(page))
    named = {found[0] for text in quoted if (found := re.match(rf"({SECTIONS})(\.\w+)+", text))}
    assert named <= known | set(FIELDS)


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_of_code(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@every_page
def test_command_lines_parse(page: Path) -> None:
    known = set(FIELDS)
    for arguments in commands(page):
        given = parse(arguments)
        if "line" in given:
            given = parse(given.line[given.line[0] == "--" :])
        for override in getattr(given, "overrides", []):
            assert override.partition("=")[0] in known, override


def test_the_readme_shows_every_command() -> None:
    groups = {
        "data": ("tokenize", "show"),
        "checkpoint": ("list", "verify", "diff", "export-weights"),
        "launch": ("local", "slurm", "kubernetes"),
    }
    wanted = {f"{group} {name}" for group, names in groups.items() for name in names}
    lines = commands(PAGES[0])
    shown = {" ".join(words[: 2 if words[0] in groups else 1]) for words in lines}
    assert shown == {"check", "plan", "compile", "train", "eval", "sample", *wanted}


def test_the_changelog_has_the_version() -> None:
    number = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert number is not None
    assert f"\n## {number[1]} - " in FRONT[2].read_text(encoding="utf-8")


@every_page
def test_yaml_is_part_of_a_config(page: Path) -> None:
    for body in fenced(page, "yaml"):
        Config.model_validate(document.parse(body, page.name))


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"`((?:olmo_jax|tools|tests|configs)/[\w./]+)`", outside_of_code(page))
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing


@every_page
def test_python_imports_what_is_there(page: Path) -> None:
    for body in fenced(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    there = hasattr(importlib.import_module(node.module), alias.name)
                    assert there or importlib.import_module(whole)


def test_calls_of_the_readmes_python_fit_their_functions():
    """Each call of what the block imports, by the number and names of its arguments."""
    tree = ast.parse(FRONT[0].read_text().split("```python\n")[1].split("```")[0])
    known = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            module = importlib.import_module(str(node.module))
            path = f"{node.module}.{alias.name}"
            known[alias.name] = getattr(module, alias.name, None) or importlib.import_module(path)
    num_calls = 0
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, _, attribute = ast.unparse(call.func).partition(".")
        if name in known and name != "Path":
            function = getattr(known[name], attribute) if attribute else known[name]
            given = {word.arg: None for word in call.keywords}
            inspect.signature(function).bind(*call.args, **given)
            num_calls += 1
    assert num_calls == 6
