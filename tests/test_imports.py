"""Imports go one way: the contract in pyproject.toml holds, and would be seen to break."""

import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def layers():
    """Return the layers from the top: packages of one line are independent of each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    return [
        grimp.Layer(*(name.strip() for name in line.split("|")), independent=True)
        for line in contract["layers"]
    ]


def wrong(graph, layers):
    """Return (importer, imported) packages of every import that goes the wrong way."""
    found = graph.find_illegal_dependencies_for_layers(layers=layers)
    return {(each.importer, each.imported) for each in found}


def test_every_package_stands_in_the_contract(layers):
    packages = {
        f"olmo_jax.{path.stem}"
        for path in (ROOT / "olmo_jax").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    packages.discard("olmo_jax.__init__")
    assert packages == {name for layer in layers for name in layer.module_tails}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("olmo_jax.parallel.ddp", "olmo_jax.plan.plan"),
        ("olmo_jax.model.moe", "olmo_jax.parallel.expert"),
        ("olmo_jax.train.step", "olmo_jax.plan.flops"),
        ("olmo_jax.arch.layers", "olmo_jax.mesh.axes"),
    ],
)
def test_imports_go_one_way_and_one_that_does_not_is_found(importer, imported, layers):
    graph = grimp.build_graph("olmo_jax", cache_dir=None)
    assert wrong(graph, layers) == set()
    graph.add_import(importer=importer, imported=imported)
    package = ".".join(importer.split(".")[:2]), ".".join(imported.split(".")[:2])
    assert wrong(graph, layers) == {package}
