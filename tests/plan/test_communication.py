"""What a step sends, by formula: as counted on its jaxpr, and where the compiler leaves it."""

import math
from collections import defaultdict

import pytest

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import ModelConfig, WindowConfig
from olmo_jax.inspect import MICROBATCHES, hlo, jaxpr
from olmo_jax.plan.communication import communication, total_bytes
from tests import cases
from tests.cases import layout_of
from tests.plan.traffic import counted, planned, sizes_of

MOVED = ("weights", "gradients")
FSDP = {"method": "fsdp"}
BF16 = {"dtype": "bfloat16"}

METHODS = {
    "ddp": ({"data": 8}, {}),
    "ddp, whole state": ({"data": 4, "fsdp": 2}, {"shard_optimizer": False}),
    "ddp, experts": ({"data": 2, "expert": 4}, {}),
    "ddp, experts, sizes that do not divide": ({"fsdp": 3, "expert": 2}, {}),
    "fsdp": ({"fsdp": 8}, FSDP),
    "fsdp, experts": ({"fsdp": 2, "expert": 4}, FSDP),
    "fsdp, sizes that do not divide": ({"fsdp": 3, "expert": 2}, FSDP),
    "fsdp, kept after forward": ({"fsdp": 8}, FSDP | {"reshard": "after_backward"}),
    "fsdp, kept for the step": ({"fsdp": 8}, FSDP | {"reshard": "step"}),
    "hsdp": ({"data": 2, "fsdp": 4}, FSDP),
    "hsdp, experts": ({"data": 2, "fsdp": 2, "expert": 2}, FSDP),
    "hsdp, experts, kept after forward": (
        {"data": 2, "fsdp": 2, "expert": 2},
        FSDP | {"reshard": "after_backward"},
    ),
    "hsdp, experts, kept for the step": (
        {"data": 2, "fsdp": 2, "expert": 2},
        FSDP | {"reshard": "step"},
    ),
}

RING = {"context": "ring"}
FOLDED = {"fold_sequence": True}
WINDOWS = {"model": {"num_layers": 6, "windows": WindowConfig(pattern=(4, -1))}}
CONTEXTS = {
    "ulysses": ({"sequence": 2}, {}, {}),
    "ulysses, fewer key heads than ranks": ({"sequence": 4}, {}, {}),
    "ulysses, experts": ({"expert": 2, "sequence": 2}, {}, {}),
    "ulysses, folded": ({"expert": 2, "sequence": 4}, FOLDED, {}),
    "ulysses, fsdp, folded": ({"fsdp": 2, "expert": 2, "sequence": 2}, FSDP | FOLDED, {}),
    "ulysses, recomputed": ({"sequence": 2}, {}, {"train": {"recompute": "attention"}}),
    "ulysses, exchanged again": (
        {"sequence": 2},
        {},
        {"train": {"recompute": ("exchanged_query", "exchanged_attention")}},
    ),
    "ring": ({"sequence": 2}, RING, {}),
    "ring of four, windows": ({"sequence": 4}, RING, WINDOWS),
    "ring, hsdp, folded": ({"data": 2, "fsdp": 2, "sequence": 2}, RING | FSDP | FOLDED, {}),
    "ring, recomputed": ({"sequence": 4}, RING, {"train": {"recompute": "block"}}),
    "ring, normaliser again": (
        {"sequence": 4},
        RING,
        {"train": {"recompute": ("attention_logsumexp",)}},
    ),
    "ring, one layer scanned": ({"sequence": 2}, RING, {"model": {"num_layers": 2}}),
}
NUM_MICROBATCHES = (1, 2, 4, 8)
GLOBAL = {"balance_scope": "global"}

MODELS = {
    "biases, no norm after a branch": {
        "model": {"attention_bias": True, "norm": "pre", "qk_norm": "none"},
        "router": {"bias": True},
    },
    "biases, norms after only, other gates": {
        "model": {"attention_bias": True, "norm": "reordered", "qk_norm": "full"},
        "router": {"bias": True, "gating": "topk_softmax", "bias_gamma": None},
    },
    "clipped, gated by head, scaled softmax": {
        "model": {"clip_qkv": 1.0, "attention_gate": "headwise", "scalable_softmax": True},
        "router": {"gating": "sigmoid", "assignment": "learned", "jitter_eps": 0.1},
    },
    "gated by element, no shared expert": {
        "model": {"attention_gate": "elementwise", "shared_hidden": 0, "qk_norm": "head_gains"},
    },
    "tied head": {"model": {"tie_embeddings": True}},
    "tied head without embedding norm": {
        "model": {"tie_embeddings": True, "embedding_norm": False}
    },
    "no routed layer": {"model": {"num_dense_layers": 3}, "router": GLOBAL},
    "no dense layer, counts over all ranks": {"model": {"num_dense_layers": 0}, "router": GLOBAL},
    "counts of a microbatch": {"router": {"balance_scope": "microbatch"}},
    "windows, layers outside the scan": {
        "model": {"num_layers": 8, "windows": WindowConfig(pattern=(4, -1))},
        "router": GLOBAL,
    },
    "float32": {"model": {"dtype": "float32"}},
    "uniform routes": {
        "model": {"num_layers": 5, "num_dense_layers": 1},
        "router": GLOBAL | {"assignment": "uniform"},
        "train": {"recompute": "block"},
    },
}

RECOMPUTE = (
    "block",
    "attention",
    "experts",
    ("embedding",),
    ("combined",),
    ("expert_rows",),
    ("expert_rows", "route_plan"),
    ("balance_counts",),
)


def config_of(mesh, parallel, num_microbatches, *, model=None, **others):
    ranks = math.prod(mesh.values()) // mesh.get("sequence", 1)
    given = dict(parallel)
    return cases.tiny(
        mesh,
        shard_optimizer=given.pop("shard_optimizer", True),
        parallel=given,
        global_batch=num_microbatches * ranks,
        model=BF16 | (model or {}),
        **others,
    )


def assert_equal(config, program_of):
    program = program_of(config)
    step = jaxpr.live(program.jitted.trace(*program.abstract_arguments()).jaxpr)
    found, wanted = counted(step, sizes_of(config)), planned(config)
    assert found.keys() == wanted.keys()
    for key, (count, put_in, sent) in found.items():
        assert wanted[key][:2] == [count, put_in], key
        # Thirds and sixths are not exact in floats.
        assert wanted[key][2] == pytest.approx(sent, rel=1e-14), key


# The programs that are compiled below.
IN_MAKE_TEST = {("hsdp, experts", 4), ("hsdp, experts, kept for the step", 4)}


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [
        pytest.param(name, m, marks=[] if (name, m) in IN_MAKE_TEST else pytest.mark.matrix)
        for name in METHODS
        for m in NUM_MICROBATCHES
    ],
)
def test_every_method_sends_what_the_plan_says(name, num_microbatches, program_of):
    mesh, parallel = METHODS[name]
    assert_equal(config_of(mesh, parallel, num_microbatches), program_of)


IN_MAKE_TEST_OF_CONTEXTS = ("ulysses, folded", "ring of four, windows")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_MAKE_TEST_OF_CONTEXTS else pytest.mark.matrix)
        for name in CONTEXTS
    ],
)
def test_context_parallelism_sends_what_the_plan_says(name, program_of):
    mesh, parallel, others = CONTEXTS[name]
    assert_equal(config_of(mesh, parallel, 2, **others), program_of)


@pytest.mark.matrix
@pytest.mark.parametrize("reshard", ["full", "step"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_sends_what_the_plan_says(name, reshard, program_of):
    mesh = {"data": 2, "fsdp": 2, "expert": 2}
    assert_equal(config_of(mesh, FSDP | {"reshard": reshard}, 2, **MODELS[name]), program_of)


@pytest.mark.parametrize(
    ("names", "norm", "parallel"),
    [
        pytest.param(
            names,
            norm,
            parallel,
            marks=[] if (names, norm, parallel) == ("block", "peri", {}) else pytest.mark.matrix,
        )
        for names in RECOMPUTE
        for norm in ("peri", "pre")
        for parallel in (FSDP, {}, FSDP | {"reshard": "after_backward"})
    ],
)
def test_what_backward_computes_again_is_sent_again(names, norm, parallel, program_of):
    mesh = {"data": 2, "fsdp": 2, "expert": 2}
    config = config_of(
        mesh, parallel, 2, model={"norm": norm}, router=GLOBAL, train={"recompute": names}
    )
    assert_equal(config, program_of)


@pytest.mark.parametrize("name", METHODS)
def test_weights_and_gradients_of_ddp_are_sent_once_and_those_of_fsdp_with_every_microbatch(name):
    mesh, parallel = METHODS[name]
    traffic = [communication(layout_of(config_of(mesh, parallel, m))) for m in NUM_MICROBATCHES]
    inside = [total_bytes(each, what=MOVED, in_loop=True) for each in traffic]
    assert inside == [m * inside[0] for m in NUM_MICROBATCHES]
    assert (inside[0] > 0) == (parallel.get("method") == "fsdp")
    once = [total_bytes(each, what=MOVED, in_loop=False) for each in traffic]
    assert once == [once[0]] * len(traffic)


# No leaf of it has an odd size: 8 ranks divide every one.
EVEN = ModelConfig()


@pytest.mark.parametrize(
    ("mesh", "parallel", "wanted"),
    [
        ({"data": 8}, {}, (0, 6)),
        ({"data": 8}, {"shard_optimizer": False}, (0, 8)),
        ({"fsdp": 8}, FSDP, (8, 0)),
        ({"fsdp": 8}, FSDP | {"reshard": "after_backward"}, (6, 0)),
        ({"fsdp": 8}, FSDP | {"reshard": "step"}, (4, 2)),
    ],
)
def test_bytes_of_a_parameter_are_those_of_the_closed_form(mesh, parallel, wanted):
    """Bytes sent a parameter times (n-1)/n: in a microbatch, and once a step.

    FSDP gathers 2 bytes forward and 2 backward and scatters 4; the embedding's table is not needed
    backward.
    """
    model = {name: value for name, value in EVEN if name not in ("router", "dtype")}
    config = config_of(mesh, parallel, 1, model=model)
    traffic = communication(layout_of(config))
    table = EVEN.vocab_size * EVEN.d_model
    total = sum(leaf.size for leaf in parameters(EVEN).values())
    inside, once = wanted
    saved = 2 * table if parallel.get("reshard", "full") == "full" and parallel.get("method") else 0
    assert total_bytes(traffic, what=MOVED, in_loop=True) == (inside * total - saved) * 7 / 8
    assert total_bytes(traffic, what=MOVED, in_loop=False) == once * total * 7 / 8


ROUTING = ("exchange_counts", "dispatch", "combine", "sum_over")


def places(program):
    """Return, of the compiled step, the kinds of collectives by (in the loop, not of routing)."""
    found = defaultdict(set)
    for each in hlo.collectives(hlo.parse(program.compiled.as_text())):
        of_routing = any(scope in each.op_name for scope in ROUTING)
        found[jaxpr.inside(each.loops, scope=MICROBATCHES), not of_routing].add(each.kind)
    return found


SMALL = {"reduce", "max"}
"""Norm, losses, counts, and what HSDP sums over `data` once a step."""


@pytest.mark.parametrize(
    ("parallel", "inside", "outside"),
    [
        (FSDP, {"all_gather", "reduce_scatter"}, SMALL),
        (FSDP | {"reshard": "step"}, {"reduce_scatter"}, SMALL | {"all_gather"}),
        pytest.param(
            FSDP | {"reshard": "after_backward"},
            {"all_gather", "reduce_scatter"},
            SMALL,
            marks=pytest.mark.matrix,
        ),
        pytest.param({}, set(), SMALL | {"all_gather", "reduce_scatter"}, marks=pytest.mark.matrix),
    ],
    ids=["fsdp", "kept for the step", "kept after forward", "ddp"],
)
def test_the_compiler_moves_no_weight_and_no_gradient_out_of_the_loop(
    parallel, inside, outside, program_of
):
    found = places(program_of(cases.bf16_on_eight(4, parallel)))
    assert found[True, True] == inside
    assert found[False, True] == outside
    assert found[False, False] == set()
