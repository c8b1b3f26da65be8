"""What a device holds: the closed forms of the literature, and the compiled step's buffers."""

import math
import re

import pytest

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from olmo_jax.inspect import MICROBATCHES, hlo
from olmo_jax.inspect.contract import memory_bytes
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan.state_memory import state_memory
from tests import cases
from tests.cases import layout_of

FSDP = {"method": "fsdp"}


def config_of(mesh, parallel, model):
    rows = math.prod(mesh.values())
    return Config(
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**parallel),
        model=model,
        train=TrainConfig(global_batch=rows),
    )


def planned(mesh, parallel, model):
    return state_memory(Layout(config_of(mesh, parallel, model), dict.fromkeys(AXES, 1) | mesh))


def families(model):
    """Return the number of (dense, expert) parameters."""
    shapes = parameters(model).values()
    experts = sum(leaf.size for leaf in shapes if "experts" in leaf.dims)
    return sum(leaf.size for leaf in shapes) - experts, experts


def whole(found):
    """Return the bytes that the closed forms count."""
    return found.weights + found.gradients + found.main + found.moments


@pytest.mark.parametrize(
    ("mesh", "dense_ranks", "expert_ranks"),
    [({"data": 64}, 64, 64), ({"data": 8, "expert": 8}, 64, 8), ({"fsdp": 4, "expert": 8}, 32, 4)],
)
@pytest.mark.parametrize("name", ["Tiny-64E", "Medium-96E"])
def test_ddp_holds_6_and_12_over_n_bytes_a_parameter(
    name, mesh, dense_ranks, expert_ranks, recipes
):
    """Of the experts a rank has its part, whose state the ranks with the same experts share."""
    dense, experts = families(recipes[name])
    local = experts // mesh.get("expert", 1)
    wanted = 6 * (dense + local) + 12 * (dense / dense_ranks + local / expert_ranks)
    # Norms of queries and keys have 128 gains a layer: indivisible ones would show here.
    assert whole(planned(mesh, {}, recipes[name])) == wanted


def test_ddp_with_a_whole_state_holds_18_bytes_a_parameter(recipes):
    model = recipes["Tiny-64E"]
    found = planned({"data": 8}, {"shard_optimizer": False}, model)
    assert whole(found) == 18 * sum(families(model))


@pytest.mark.parametrize("mesh", [{"fsdp": 64}, {"fsdp": 8, "expert": 8}, {"data": 4, "fsdp": 64}])
def test_fsdp_holds_16_over_n_bytes_a_parameter_and_one_unit(mesh, recipes):
    model = recipes["Tiny-64E"]
    found = planned(mesh, FSDP, model)
    assert whole(found) == 16 * sum(families(model)) / 64
    block = [leaf for name, leaf in parameters(model).items() if name.startswith("body.")]
    experts = sum(leaf.size for leaf in block if "experts" in leaf.dims)
    dense = sum(leaf.size for leaf in block) - experts
    block_size = (dense + experts // mesh.get("expert", 1)) // block[0].shape[0]
    table = (model.vocab_size + 1) * model.d_model
    assert found.gathered == 2 * max(block_size, table)


def test_kept_weights_are_all_gathered_at_once(recipes):
    model = recipes["Tiny-64E"]
    for reshard in ("after_backward", "step"):
        found = planned({"fsdp": 64}, FSDP | {"reshard": reshard}, model)
        assert found.gathered == 2 * sum(families(model))


def test_the_head_gathers_a_tied_embedding():
    model = ModelConfig(vocab_size=100_352)
    untied, tied = (
        planned({"fsdp": 8}, FSDP, model.model_copy(update={"tie_embeddings": tie}))
        for tie in (False, True)
    )
    assert untied.gathered == tied.gathered == 2 * (100_352 + 1) * model.d_model


def test_what_no_axis_divides_is_held_whole():
    """Eight ranks do not divide 67 rows of 3: nothing of the table is shared."""
    model = ModelConfig(vocab_size=67, d_model=3, num_layers=1, head_dim=2, num_heads=1)
    model = model.model_copy(update={"num_kv_heads": 1, "dense_hidden": 8})
    found = planned({"fsdp": 8}, FSDP, model)
    dense, _ = families(model)
    # The MLP's two matrices: 8 ranks divide their 8 and 16 columns.
    shared = 3 * 16 + 8 * 3
    assert found.main == 4 * (dense - shared + shared // 8)


def rewritten(compiled):
    """Return the types of the FP32 buffers that the loop over microbatches writes.

    What a loop only reads it hands on as it came.
    """
    module = hlo.parse(compiled.as_text())
    found = []
    for instruction, loops in hlo.instructions(module):
        if instruction.opcode == "while" and not loops and MICROBATCHES in instruction.op_name:
            (body,) = re.findall(r"\bbody=%?([\w.\-]+)", instruction.attributes)
            by_name = {each.name: each for each in module.computations[body]}
            root = module.computations[body][-1]
            results = enumerate(by_name[name] for name in root.operands)
            found += [each.type for i, each in results if not hands_on(each, i)]
    return [text for text in found if text.startswith("f32")]


def hands_on(result, index):
    return result.opcode == "get-tuple-element" and result.attributes.startswith(f", index={index}")


WHOLE_STATE = cases.tiny(
    {"data": 2, "expert": 4},
    shard_optimizer=False,
    model={"dtype": "bfloat16"},
    global_batch=32,
)
PROGRAMS = {
    "ddp": cases.bf16_on_eight(4),
    "hsdp": cases.bf16_on_eight(4, FSDP),
    "kept for the step": cases.bf16_on_eight(4, FSDP | {"reshard": "step"}),
    "kept after forward": cases.bf16_on_eight(4, FSDP | {"reshard": "after_backward"}),
    "whole state": WHOLE_STATE,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("ddp", "hsdp") else pytest.mark.matrix)
        for name in PROGRAMS
    ],
)
def test_the_compiled_step_holds_what_the_plan_says(name, program_of):
    config = PROGRAMS[name]
    compiled = program_of(config).compiled
    wanted = state_memory(layout_of(config))
    # Every byte of the state, donated; the accumulators and a few sums of each microbatch.
    assert memory_bytes(compiled)["alias"] == wanted.state
    accumulated = sum(hlo.type_bytes(text) for text in rewritten(compiled))
    assert wanted.gradients <= accumulated <= 1.01 * wanted.gradients
