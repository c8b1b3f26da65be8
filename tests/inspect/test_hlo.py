"""Programs compiled here for eight CPU devices, and one compiled for eight H200s, read back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from olmo_jax.inspect import hlo
from olmo_jax.inspect.jaxpr import inside

BOTH = ("data", "expert")
EXPERT_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
DATA_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))


def ddp_step(weight, main, x):
    """Accumulate over microbatches, communicate once, update a shard; experts talk in the loop."""
    local = lax.pcast(weight, BOTH, to="varying")

    def microbatch(total, x):
        def loss(w):
            rows = lax.all_gather(jnp.tanh(x @ w), "expert", axis=0, tiled=True)
            return lax.psum_scatter(rows**2, "expert", scatter_dimension=0, tiled=True).sum()

        return total + jax.grad(loss)(local), None

    with jax.named_scope("microbatches"):
        grad, _ = lax.scan(microbatch, jnp.zeros_like(local), x)
    grad = lax.psum_scatter(grad, BOTH, scatter_dimension=0, tiled=True)
    main = main - 0.1 * grad
    norm = lax.psum((grad**2).sum(), BOTH)
    largest = lax.pmax(jnp.abs(grad).max(), BOTH)
    return lax.all_gather(main, BOTH, tiled=True, to="invarying"), main, norm, largest


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), BOTH)


def compiled(body, *args, in_specs, out_specs, donate=()):
    mapped = jax.shard_map(
        body, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=True
    )
    text = jax.jit(mapped, donate_argnums=donate).lower(*args).compile().as_text()
    return hlo.parse(text)


@pytest.fixture(scope="module")
def step():
    return compiled(
        ddp_step,
        jnp.ones((16, 8)),
        jnp.ones((16, 8)),
        jnp.ones((3, 32, 16)),
        in_specs=(P(), P(BOTH), P(None, BOTH)),
        out_specs=(P(), P(BOTH), P(), P()),
        donate=(0, 1),
    )


@pytest.fixture(scope="module")
def h200_step():
    return hlo.parse((Path(__file__).parent / "h200_step.hlo").read_text())


def split(module, **loop):
    """Return the kinds inside and outside of a loop."""
    found = hlo.collectives(module)
    within = [c for c in found if inside(c.loops, **loop)]
    return hlo.kinds(within), hlo.kinds(c for c in found if c not in within)


def test_collectives_inside_and_outside_the_microbatch_loop(step):
    expert = {"all_gather": 1, "reduce_scatter": 1}
    once = {"all_gather": 1, "max": 1, "reduce": 1, "reduce_scatter": 1}
    assert split(step, scope="microbatches") == (expert, once)
    assert split(step, length=3) == (expert, once)
    assert split(step, length=4) == ({}, {k: once[k] + expert.get(k, 0) for k in once})


def test_types_bytes_and_groups_of_collectives(step):
    found = {(c.kind, inside(c.loops, length=3)): c for c in hlo.collectives(step)}
    gathered = found["all_gather", True]
    assert gathered.operands == ("f32[4,8]",)
    assert gathered.operand_bytes == 4 * 8 * 4
    assert gathered.groups == EXPERT_GROUPS
    assert "microbatches" in gathered.op_name
    scattered = found["reduce_scatter", False]
    assert scattered.operand_bytes == 16 * 8 * 4
    assert scattered.groups == (tuple(range(8)),)


def test_loops_know_their_trip_count(step):
    assert [loop.length for loop in hlo.loops(step)] == [3]
    assert hlo.unbounded_loops(step) == []
    assert hlo.conditionals(step) == []
    assert hlo.callbacks(step) == []


def test_donated_parameters_and_their_bytes(step):
    assert hlo.donated(step) == {0: 16 * 8 * 4, 1: 2 * 8 * 4}


def test_nothing_is_donated_unless_asked():
    module = hlo.parse(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile().as_text())
    assert hlo.donated(module) == {}


def test_paths_through_nested_loops_all_to_all_and_permute():
    def body(x):
        def layer(x, _):
            return lax.all_to_all(jnp.sin(x), "expert", 0, 0, tiled=True), None

        def microbatch(x, _):
            x = lax.scan(layer, x, None, length=3)[0]
            return lax.ppermute(x, "data", [(0, 1), (1, 0)]), None

        return lax.scan(microbatch, x, None, length=5)[0]

    module = compiled(body, jnp.ones((64, 16)), in_specs=P(BOTH), out_specs=P(BOTH))
    found = {c.kind: c for c in hlo.collectives(module)}
    assert [loop.length for loop in found["all_to_all"].loops] == [5, 3]
    assert found["all_to_all"].groups == EXPERT_GROUPS
    assert found["all_to_all"].operand_bytes == 8 * 16 * 4
    assert [loop.length for loop in found["permute"].loops] == [5]
    assert set(found["permute"].groups) == {(r, (r + 4) % 8) for r in range(8)}


def test_unbounded_loops_conditionals_and_callbacks_are_found():
    def body(x):
        x = lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)
        x = lax.fori_loop(0, 4, lambda _, x: jnp.sin(x), x)
        x = lax.cond(x.sum() > 0, lambda x: jnp.cos(x) + 1, lambda x: jnp.sin(x) * 2, x)
        jax.debug.callback(lambda _: None, x)
        return x

    module = hlo.parse(jax.jit(body).lower(jnp.ones(300)).compile().as_text())
    assert sorted(loop.length or 0 for loop in hlo.loops(module)) == [0, 4]
    assert len(hlo.unbounded_loops(module)) == 1
    assert len(hlo.conditionals(module)) == 1
    assert len(hlo.callbacks(module)) == 1


def test_a_gpu_program_with_asynchronous_collectives(h200_step):
    """Plain, -start/-done and fused all-reduces (a one-shot kernel) are one collective each."""
    inner = {"all_gather": 1, "reduce_scatter": 1}
    outer = {"all_gather": 1, "reduce": 1, "reduce_scatter": 1}
    assert split(h200_step, scope="microbatches") == (inner, outer)
    assert [loop.length for loop in hlo.loops(h200_step)] == [4]
    assert hlo.donated(h200_step) == {0: 2048 * 2048 * 2}


def test_bytes_of_a_gpu_program_keep_bf16(h200_step):
    found = {
        (c.kind, inside(c.loops, length=4)): (c.operands, c.operand_bytes, c.asynchronous)
        for c in hlo.collectives(h200_step)
    }
    assert found == {
        ("all_gather", True): (("bf16[1024,2048]",), 2 << 21, False),
        ("reduce_scatter", True): (("bf16[4096,2048]",), 2 << 23, True),
        ("reduce_scatter", False): (("f32[2048,2048]",), 4 << 22, True),
        ("all_gather", False): (("bf16[256,2048]",), 2 << 19, True),
        ("reduce", False): (("f32[]",), 4, False),
    }


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true", EXPERT_GROUPS),
        ("replica_groups=[2,4]<=[8], dimensions={0}", EXPERT_GROUPS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", DATA_GROUPS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'expert'}, channel_id=1", EXPERT_GROUPS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data'}", DATA_GROUPS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data','expert'}", (tuple(range(8)),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={}", ()),
    ],
)
def test_each_printed_form_of_groups_is_read(printed, groups):
    assert hlo.replica_groups(f"channel_id=1, {printed}") == groups


def test_an_unknown_form_of_groups_is_refused():
    with pytest.raises(ValueError, match=r"cannot read the replica groups \"mesh\['data'=2\], dev"):
        hlo.replica_groups("replica_groups=mesh['data'=2], device_ids=(1,0)")


@pytest.mark.parametrize(
    ("printed", "num_bytes"),
    [
        ("f32[8,8]{1,0}", 256),
        ("(bf16[4], s32[], pred[3])", 8 + 4 + 3),
        ("f8e4m3fn[16]{0:T(256)}", 16),
        ("s4[16]", 8),
        ("()", 0),
    ],
)
def test_bytes_of_a_printed_type(printed, num_bytes):
    assert hlo.type_bytes(printed) == num_bytes


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_step {}")
