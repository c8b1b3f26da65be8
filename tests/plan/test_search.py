"""`olmo-jax plan --search`: every mesh once, ranked by time, the rest by reason."""

import json
import math

import pytest

from olmo_jax.cli import main
from olmo_jax.mesh.axes import AXES
from olmo_jax.plan.hardware import MACHINES
from olmo_jax.plan.render import search_text
from olmo_jax.plan.search import candidates, meshes, reason_of, search
from olmo_jax.rules.validation import violations
from tests.plan.test_recipes import FOLDER, recipe

H200, B300 = MACHINES["h200"], MACHINES["b300"]


@pytest.mark.parametrize("num_devices", [1, 8, 12, 128])
def test_every_mesh_is_looked_at_once(num_devices):
    found = [tuple(sizes.values()) for sizes in meshes(num_devices)]
    assert len(set(found)) == len(found)
    assert all(math.prod(sizes) == num_devices for sizes in found)
    # The ways to write a number as an ordered product of five: by its prime factors.
    exponents = {1: [], 8: [3], 12: [2, 1], 128: [7]}[num_devices]
    assert len(found) == math.prod(math.comb(n + len(AXES) - 1, n) for n in exponents)


def test_no_two_candidates_are_the_same_program():
    found = list(candidates(recipe("small_64e"), 16))
    assert all((c.method == "fsdp") == (c.sizes["fsdp"] > 1) for c in found)
    assert len({(*c.sizes.values(), c.method, c.chunks) for c in found}) == len(found)


FOUR = recipe("tiny_64e", "mesh.data=4", "train.global_batch=64", "model.num_layers=9")


@pytest.fixture(scope="module")
def found():
    return search(FOUR, 4, B300)


def test_those_that_fit_are_ranked_by_time(found):
    times = [ranked.plan.step_time_s for ranked in found.fitting]
    assert times == sorted(times)
    assert all(ranked.plan.fits for ranked in found.fitting)
    assert not any(ranked.plan.fits for ranked in found.too_large)
    assert all(not violations(ranked.plan.config) for ranked in found.fitting)
    assert found.num_candidates == len(list(candidates(FOUR, 4)))


def test_a_mesh_recomputes_no_more_than_it_must(found):
    policies = {ranked.candidate.recompute for ranked in found.fitting}
    assert "none" in policies
    for ranked in found.fitting:
        if ranked.candidate.recompute == "block":
            config = ranked.plan.config
            train = config.train.model_copy(update={"recompute": "experts"})
            less = type(ranked.plan)(
                config.model_copy(update={"train": train}), ranked.plan.sizes, B300
            )
            assert not less.fits


def test_the_configs_own_mesh_is_among_those_found(found):
    sizes = [ranked.candidate.sizes for ranked in found.fitting]
    assert any(s["data"] == 4 for s in sizes)


def test_what_is_refused_is_counted_by_reason():
    changes = ("mesh.data=2", "train.microbatch=1", "train.global_batch=6")
    found = search(recipe("tiny_64e", *changes), 4, H200)
    assert found.rejected["train.global_batch"] > 0
    assert "refused by train.global_batch" in search_text(found, "h200", 4)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("mesh.expert=6 does not divide model.num_experts=64; use 1", "mesh.expert"),
        ("train.global_batch=9 is not", "train.global_batch"),
        ("something else; use that", "something else"),
    ],
)
def test_a_reason_is_the_key_that_a_message_begins_with(message, reason):
    assert reason_of(message) == reason


def test_ten_are_listed_with_what_takes_their_time(found):
    said = search_text(found, "b300", 4).splitlines()
    ranked = [line for line in said if "parallel.method=" in line and "too large" not in line]
    assert len(ranked) == min(10, len(found.fitting))
    assert all("%" in line and "train.recompute=" in line for line in ranked)


def test_the_command_ranks_the_meshes_of_so_many_devices(capsys):
    path = str(FOLDER / "tiny_64e.yaml")
    assert main(["plan", path, "--search", "--devices", "2", "--hardware", "b300"]) == 0
    assert "meshes of 2 x b300" in capsys.readouterr().out
    assert main(["plan", path, "--search", "--devices", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"] == found["num_fitting"] + found["num_too_large"] + sum(
        found["rejected"].values()
    )
