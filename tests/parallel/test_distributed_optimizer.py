"""Reduce, gather and norm of single leaves on eight devices, for every way that a leaf may lie."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.specs import METHODS, ParameterSpecs, Spec, axes_used, further_spec
from olmo_jax.parallel.distributed_optimizer import gather_to_resident, global_norm, reduce_to_main

SIZES = {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 2, "sequence": 1}
LEAVES = {
    "one_dim_takes_all": ((16, 3), Spec(None, None)),
    "a_later_dim_takes_all": ((3, 16), Spec(None, None)),
    "an_axis_each": ((2, 6, 10), Spec(None, None, None)),
    "one_axis_is_left": ((4, 3), Spec(None, None)),
    "none_divides": ((5, 3), Spec(None, None)),
    "experts": ((8, 3), Spec("expert", None)),
    "experts_with_a_replica_axis": ((2, 2, 3), Spec("expert", None, None)),
}


def placed(name, shard):
    shape, compute = LEAVES[name]
    main = further_spec(shape, compute, METHODS["ddp"].main, SIZES) if shard else compute
    return shape, ParameterSpecs(compute, compute, main)


@pytest.fixture(scope="module")
def mesh(mesh_of):
    return mesh_of(data=2, fsdp=2, expert=2)


def halves(size):
    return slice(0, size // 2), slice(size // 2, size)


@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_is_summed_over_its_replicas_and_counted_once_in_the_norm(name, shard, mesh):
    shape, specs = placed(name, shard)
    whole = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    wanted = whole.sum(axis=0)
    # The rank's own gradient: of its expert rows only, where the leaf is divided by expert.
    if "expert" in axes_used(specs.compute):
        rank_expert = np.arange(8) % 2
        wanted = np.concatenate(
            [whole[rank_expert == e][:, half].sum(0) for e, half in enumerate(halves(shape[0]))]
        )

    def step(own):
        own = own[0]
        if "expert" in axes_used(specs.compute):
            rows = own.shape[0] // 2
            own = jax.lax.dynamic_slice_in_dim(own, jax.lax.axis_index("expert") * rows, rows)
        reduced = reduce_to_main(own, specs)
        return reduced, global_norm({"leaf": reduced}, {"leaf": specs})

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(AXES), out_specs=(P(*specs.main), P())))
    reduced, norm = run(whole)
    np.testing.assert_allclose(reduced, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm, np.linalg.norm(np.float64(reduced)), rtol=1e-6)


@pytest.mark.parametrize("name", LEAVES)
def test_gathered_weights_are_the_cast_of_the_main_weights(name, mesh):
    shape, specs = placed(name, True)
    main = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    run = jax.jit(
        jax.shard_map(
            partial(gather_to_resident, specs=specs, dtype=jnp.dtype(jnp.bfloat16)),
            mesh=mesh,
            in_specs=P(*specs.main),
            out_specs=P(*specs.compute),
        )
    )
    gathered = run(main)
    assert gathered.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gathered, main.astype(gathered.dtype))
