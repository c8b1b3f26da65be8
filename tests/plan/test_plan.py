"""`olmo-jax plan`: what it counts, what it says, and how fast."""

import json
import resource
import subprocess
import sys

import pytest

from olmo_jax.cli import main
from olmo_jax.config.records import (
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    WindowConfig,
)
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES
from olmo_jax.plan import render
from olmo_jax.plan.alternatives import that_fit
from olmo_jax.plan.command import sizes_for
from olmo_jax.plan.hardware import MACHINES, bytes_per_s, in_one_node, link, machine
from olmo_jax.plan.plan import Plan
from olmo_jax.plan.step_time import TERMS
from tests.cases import layout_of
from tests.plan.test_recipes import FOLDER, RECIPES, recipe

H200 = MACHINES["h200"]


def plan_of(name, *overrides, hardware=H200):
    config = recipe(name, *overrides)
    return Plan(layout_of(config), hardware)


# Links.


@pytest.mark.parametrize(
    ("axes", "sizes", "together", "where"),
    [
        (("expert",), {"data": 4, "expert": 8}, 8, "node"),
        (("data",), {"data": 4, "expert": 8}, 1, "network"),
        (("data", "expert"), {"data": 4, "expert": 8}, 8, "network"),
        (("expert",), {"expert": 32}, 8, "network"),
        (("data",), {"data": 4, "expert": 2}, 4, "node"),
        (("pipeline",), {"pipeline": 2, "data": 2, "expert": 4}, 1, "network"),
        (("sequence",), {"data": 8, "expert": 4, "sequence": 2}, 2, "node"),
        (("expert",), {"data": 8, "expert": 8, "sequence": 2}, 4, "network"),
    ],
)
def test_groups_fill_nodes_in_rank_order(axes, sizes, together, where):
    sizes = dict.fromkeys(AXES, 1) | sizes
    assert in_one_node(H200, axes, sizes) == together
    assert link(H200, axes, sizes) == where
    rate = min(H200.node_bytes_per_s, together * H200.network_bytes_per_s)
    rate = H200.node_bytes_per_s if where == "node" else rate
    assert bytes_per_s(H200, axes, sizes) == H200.link_efficiency * rate


# What is said.


def test_every_part_adds_up():
    plan = plan_of("medium_96e")
    parts = plan.memory_bytes
    spaces = max(parts["block"] + parts["dispatch"], parts["logits"])
    others = sum(parts.values()) - parts["total"] - parts["block"] - parts["dispatch"]
    assert parts["total"] == others - parts["logits"] + spaces
    assert parts.keys() <= render.CATEGORIES.keys()
    assert sum(plan.terms.values()) == plan.step_time_s
    assert list(plan.terms) == list(TERMS)
    assert plan.terms[plan.dominant] == max(plan.terms.values())
    # Each transfer is in one row, or in the term of small things.
    in_rows = sum(row.step_bytes for row in plan.methods)
    small = plan.terms["other"] * H200.node_bytes_per_s
    sent = sum(traffic.sent_bytes for traffic in plan.communication)
    assert sent - small <= in_rows <= sent


def test_seven_methods_in_the_order_of_the_design():
    rows = {row.method: row for row in plan_of("small_64e").methods}
    assert list(rows) == [
        *("DDP", "distributed optimizer", "FSDP / HSDP", "EP", "PP", "CP", "TP"),
    ]
    assert {name for name, row in rows.items() if row.used} == {
        *("DDP", "distributed optimizer", "EP"),
    }
    # Once a step: whatever the number of microbatches, and the experts in each of them.
    more = {
        row.method: row
        for row in plan_of("small_64e", "train.microbatch=1").methods  # 24 microbatches, not 8
    }
    assert more["distributed optimizer"].step_bytes == rows["distributed optimizer"].step_bytes
    assert rows["distributed optimizer"].microbatch_bytes == 0
    assert rows["EP"].step_bytes == pytest.approx(8 * rows["EP"].microbatch_bytes)
    assert more["EP"].step_bytes == pytest.approx(rows["EP"].step_bytes, rel=1e-3)
    assert any("expert (node)" in how for how in rows["EP"].collectives)


def test_recomputation_gives_memory_for_time():
    whole, block = plan_of("small_64e"), plan_of("small_64e", "train.recompute=block")
    assert block.held.activations < whole.held.activations / 10
    assert block.terms["recompute"] > 0 == whole.terms["recompute"]
    # A third of the forward and backward products of blocks, without the head.
    ratio = block.terms["recompute"] / whole.terms["products"]
    assert 0.25 < ratio < 0.4


def test_what_does_not_fit_is_told_which_one_change_makes_it_fit():
    plan = plan_of("bench_8layer", "mesh.data=8", "mesh.expert=1")
    assert not plan.fits
    found = {change.overrides: change.plan for change in that_fit(plan.config, H200)}
    assert "mesh.expert=8 mesh.data=1" in found
    assert all(other.fits for other in found.values())
    times = [other.step_time_s for other in found.values()]
    assert times == sorted(times)
    said = render.text(plan)
    assert "does not fit" in said
    assert next(iter(found)) in said


def test_a_pipeline_holds_slots_on_every_rank_alike():
    plan = plan_of("medium_128e")
    said = render.text(plan)
    assert f"chunks alive at most: {', '.join(map(str, plan.live_chunks))}" in said
    assert plan.held.slots % max(plan.live_chunks) == 0


def command(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


QUICK = ("tiny_64e", "ultra_256e")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.matrix) for name in RECIPES],
)
def test_the_command_says_what_a_recipe_needs(name, capsys):
    said = command(capsys, FOLDER / f"{name}.yaml", "--hardware", "b300")
    for words in ("parameters", "model FLOPs a token", "time of a step", "MFU", "checkpoint"):
        assert words in said
    assert ("fits: " in said) or ("would fit with" in said) or ("no single change" in said)
    assert said.count("> ") == 1


PLAN = """
import sys
from olmo_jax.cli import main
assert main(sys.argv[1:]) == 0
assert "jax" not in sys.modules
"""


def test_the_command_takes_less_than_two_seconds_and_no_jax():
    """Of this process's children alone, without the type checks of a test run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PLAN, "plan", str(FOLDER / "large_128e.yaml")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "time of a step" in said
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_json_has_the_same_numbers(capsys):
    found = json.loads(command(capsys, FOLDER / "medium_96e.yaml", "--json", "--devices", 128))
    assert found.keys() >= {
        *("total_parameters", "active_parameters", "flops_per_token", "fits", "memory_bytes"),
        *("communication", "bubble", "step_time_s", "mfu"),
    }
    plan = plan_of("medium_96e")
    assert found["memory_bytes"] == plan.memory_bytes
    assert found["step_time_s"] == plan.step_time_s
    assert found["total_parameters"] == plan.total_parameters
    assert found["communication"]["EP"]["step_bytes"] == plan.methods[3].step_bytes


def test_an_open_axis_takes_the_devices_that_are_named(capsys):
    arguments = (FOLDER / "tiny_64e.yaml", "mesh.data=-1", "--devices", 32)
    assert "32 x h200 in 4 node(s): data=32" in command(capsys, *arguments)


def test_a_picture_is_drawn(tmp_path, capsys):
    path = tmp_path / "plan.png"
    command(capsys, FOLDER / "large_128e.yaml", "--picture", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "64"], "--devices 64 is not the 16 devices of the mesh"),
        (["--devices", "8"], "mesh.data=16 = 16 devices, but there are 8"),
        (["--hardware", "h300"], "--hardware h300 is no machine known here and no file; use a100"),
        (["--picture", "plan.gif"], "--picture plan.gif ends in '.gif'; use a name in .png or"),
        (["--picture", "plan.png", "--search"], "goes with a plan, not with --search"),
    ],
)
def test_what_does_not_go_is_said(arguments, words, capsys):
    assert main(["plan", str(FOLDER / "tiny_64e.yaml"), *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_machine_from_a_file(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(
        "name: ours\npeak_flops: 1.0e15\nmemory_bytes: 100000000000\nmemory_bytes_per_s: 4.0e12\n"
        "node_bytes_per_s: 4.0e11\nnetwork_bytes_per_s: 5.0e10\ndevices_per_node: 4\n"
    )
    assert machine(str(path)).devices_per_node == 4
    path.write_text("name: ours\npeak_flops: fast\n")
    with pytest.raises(UserError, match=r"peak_flops=.* is refused .*; write name, peak_flops"):
        machine(str(path))


def test_fewer_devices_than_the_mesh_has_are_refused():
    config = recipe("tiny_64e", "mesh.data=-1", "mesh.expert=8")
    assert sizes_for(config, 16)["data"] == 2
    with pytest.raises(UserError, match="does not divide the 12 devices"):
        sizes_for(config, 12)


def test_windows_and_dense_models_have_a_plan():
    for update in (
        {"windows": WindowConfig(pattern=(128, 128, 128, -1)), "num_layers": 9},
        {"num_dense_layers": 4, "num_experts": 0, "top_k": 0},
        {"norm": "pre", "qk_norm": "none", "tie_embeddings": True},
    ):
        config = recipe("tiny_64e").model_copy(update={"model": ModelConfig(**update)})
        plan = Plan(layout_of(config), H200)
        assert plan.fits
        assert "MFU" in render.text(plan)


def test_fsdp_is_planned_with_its_own_rows():
    config = recipe("tiny_64e").model_copy(
        update={"mesh": MeshConfig(fsdp=16), "parallel": ParallelConfig(method="fsdp")}
    )
    plan = Plan(layout_of(config), H200)
    rows = {row.method: row for row in plan.methods}
    assert rows["FSDP / HSDP"].used
    assert not rows["DDP"].used
    assert rows["FSDP / HSDP"].microbatch_bytes > 0
    assert plan.terms["weight traffic"] > plan.terms["reduction"]
