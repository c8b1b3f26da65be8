"""The recipes in configs/olmo3moe: the report's sizes, batches and degrees."""

from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from olmo_jax.arch.flops import flops_per_token
from olmo_jax.arch.parameters import active_parameters, total_parameters
from olmo_jax.config_file import load
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import num_microbatches
from olmo_jax.train.program import build

FOLDER = Path(__file__).parents[2] / "configs" / "olmo3moe"
MI = 2**20

# Source: the report, table 30 and appendix B.10. Active and total parameters in units of 1e9;
# tokens of a step in Mi; tokens of a rank's microbatch; EP, PP; devices; microbatches of a step;
# model GFLOP a token by the report's rates.
RECIPES = {
    "tiny_64e": ("1.59", "12.91", 8, 65_536, 1, 1, 16, 8, "9.90"),
    "small_64e": ("4.29", "40.86", 24, 24_576, 8, 1, 128, 8, "29.05"),
    "medium_64e": ("7.37", "70.22", 16, 16_384, 8, 2, 128, 16, "50.23"),
    "medium_96e": ("7.38", "103.75", 24, 16_384, 8, 2, 128, 24, "50.25"),
    "medium_128e": ("7.38", "137.27", 24, 16_384, 8, 4, 128, 48, "50.28"),
    "large_128e": ("15.14", "295.99", 32, 8_192, 8, 4, 512, 32, "100.2"),
    "ultra_128e": ("58.36", "1.20e3", 64, 8_192, 8, 8, 512, 128, "371.8"),
    "ultra_256e": ("58.41", "2.38e3", 64, 16_384, 32, 8, 512, 64, "372.1"),
    "bench_8layer": ("3.17", "24.31", 4, 16_384, 8, 1, 8, 32, "18.18"),
}


def recipe(name, *overrides):
    return load(FOLDER / f"{name}.yaml", overrides)


def printed(value, like):
    """Return a number in as many digits as `like` has."""
    if "e" in like:
        return f"{value:.2e}".replace("e+0", "e")
    return f"{value:.{len(like.partition('.')[2])}f}"


def test_there_is_a_file_for_each_and_no_other():
    assert {path.stem for path in FOLDER.iterdir()} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_reports(name):
    active, total, batch, microbatch, ep, pp, devices, microbatches, flops = RECIPES[name]
    config = recipe(name)
    model, train, mesh = config.model, config.train, dict(config.mesh)
    assert printed(active_parameters(model) / 1e9, active) == active
    assert printed(total_parameters(model) / 1e9, total) == total
    assert train.global_batch * train.sequence_length == batch * MI
    assert train.microbatch * train.sequence_length == microbatch
    assert (mesh["expert"], mesh["pipeline"]) == (ep, pp)
    assert mesh["data"] * ep * pp == devices
    assert num_microbatches(train, mesh) == microbatches
    assert printed(flops_per_token(model, train.sequence_length) / 1e9, flops) == flops


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"bench_8layer"}))
def test_the_rate_grows_with_the_batch_to_the_power_of_053(name):
    """Source: the report, section 16: eta(8 Mi) (batch / 8 Mi)^0.53, so 1.790 times at 24 Mi."""
    config = recipe(name)
    batch = config.train.global_batch * config.train.sequence_length
    base = 1.2e-4 if name.startswith(("large", "ultra")) else 1.8e-4
    assert config.optim.lr == pytest.approx(base * (batch / (8 * MI)) ** 0.53, rel=3e-4)
    tokens = config.train.steps * batch
    assert 200e9 - batch < tokens <= 200e9


@pytest.mark.parametrize(("experts", "total"), [(8, 4.6), (32, 13.0), (48, 18.7), (128, 46.9)])
def test_the_benchmarks_pool_grows_and_what_a_token_meets_does_not(experts, total):
    model = recipe("bench_8layer", f"model.num_experts={experts}").model
    assert f"{active_parameters(model) / 1e9:.2f}" == "3.17"
    assert round(total_parameters(model) / 1e9, 1) == pytest.approx(total, abs=0.051)


QUICK = ("tiny_64e",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.matrix) for name in RECIPES],
)
def test_a_recipe_traces_at_its_real_size(name):
    """The whole step, on a mesh that has the recipe's number of devices and none of them."""
    config = recipe(name)
    mesh = AbstractMesh(tuple(getattr(config.mesh, axis) for axis in AXES), AXES)
    program = build(config, mesh)
    state, metrics = jax.eval_shape(program.jitted, *program.abstract_arguments())
    assert metrics["loss"].shape == ()
    held = sum(leaf.size for leaf in jax.tree.leaves(state.main))
    # Empty places of a pipeline's stages are in the state and no parameters.
    assert total_parameters(config.model) <= held < 1.1 * total_parameters(config.model)
