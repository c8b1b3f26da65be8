"""Tiny configs, unkind batches and the one-device oracle that the tests of the step share.

No size is kind: the vocabulary is prime, a row has 23 positions, heads are 6 wide, and some leaf
has no dim that all replica axes divide.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from olmo_jax.arch.layers import PADDING_LAYER, StageLayout, body_stages
from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)
from olmo_jax.data.batch import Batch
from olmo_jax.mesh.layout import Layout
from olmo_jax.model.execution import one_device
from olmo_jax.model.objective import Divisors, LossParts, batch_sums, count, divide, total
from olmo_jax.model.transformer import by_period
from olmo_jax.optim.clip import clip_coefficient
from olmo_jax.optim.decay import decay_mask
from olmo_jax.optim.optimizer import optimizer, update
from olmo_jax.train.program import Program
from olmo_jax.train.state import State, first_state, shardings

ROWS, LENGTH, VOCAB = 16, 23, 67
DROPS_NOTHING = 8.0
"""A capacity factor that no routing exceeds: as many rows as a group of 8 ranks can send."""

EXPERT_BIAS = "body.moe.router.score_bias"

MODEL = ModelConfig(
    num_layers=3,
    d_model=32,
    head_dim=6,
    num_experts=8,
    expert_hidden=20,
    shared_hidden=12,
    dense_hidden=28,
    vocab_size=VOCAB,
    dtype="float32",
)


def tiny(
    mesh: Mapping[str, int],
    *,
    microbatch: int = 1,
    global_batch: int = ROWS,
    capacity_factor: float = DROPS_NOTHING,
    shard_optimizer: bool = True,
    parallel: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> Config:
    """Return a config for a mesh; routes are random unless `router` says otherwise."""
    routing = RouterConfig(**({"assignment": "random", "bias_gamma": 0.01} | dict(router or {})))
    defaults = {"head_chunk_tokens": 16, "record_expert_counts": True, "sequence_length": LENGTH}
    settings: dict[str, Any] = defaults | dict(train or {})
    return Config(
        mesh=MeshConfig(**mesh),
        model=MODEL.model_copy(update={**(model or {}), "router": routing}),
        parallel=ParallelConfig(
            capacity_factor=capacity_factor, shard_optimizer=shard_optimizer, **(parallel or {})
        ),
        optim=OptimConfig(**(optim or {})),
        train=TrainConfig(
            global_batch=global_batch,
            microbatch=microbatch,
            **settings,
        ),
    )


def layout_of(config: Config) -> Layout:
    """Return the layout of a config whose mesh has no open axis."""
    return Layout(config, dict(config.mesh))


def unkind_batch(seed: int, *, rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB) -> Batch:
    """Return rows of documents of odd lengths, with unequal numbers of labels, and padding.

    Row 3 ends in padding, row 7 is nothing else, row 5 has no label; padding holds random values.
    """
    draw = np.random.default_rng(seed)
    begins = draw.random((rows, length)) < 0.2
    begins[:, 0] = True
    segments = np.cumsum(begins, axis=1)
    place = np.broadcast_to(np.arange(length), (rows, length))
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    labels = draw.integers(0, vocab, (rows, length))
    labels[draw.random((rows, length)) < draw.random((rows, 1)) / 2] = -100
    labels[5] = -100
    real = np.ones((rows, length), bool)
    real[3, length - 5 :] = real[7] = False
    tokens = draw.integers(0, vocab, (rows, length))
    return scramble_padding(
        Batch(
            *(value.astype(np.int32) for value in (tokens, labels, segments, positions)),
            padding_mask=real,
            sequence=np.arange(rows, dtype=np.int32),
        ),
        seed,
        vocab=vocab,
    )


def scramble_padding(batch: Batch, seed: int, *, vocab: int = VOCAB) -> Batch:
    """Return the batch with other random values where it is not real."""
    draw = np.random.default_rng(seed + 1000)
    limits = {"tokens": vocab, "labels": vocab, "segment_ids": 5, "positions": LENGTH}
    return batch._replace(
        **{
            name: np.where(
                batch.padding_mask,
                getattr(batch, name),
                draw.integers(0, limit, batch.padding_mask.shape, dtype=np.int32),
            )
            for name, limit in limits.items()
        }
    )


def weights_of(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Return FP32 weights without structure: gains around 1, everything else around 0."""
    draw = np.random.default_rng(seed)
    return {
        name: np.float32("gain" in name) + draw.normal(0, 0.2, leaf.shape).astype(np.float32)
        for name, leaf in parameters(program.config.model).items()
    }


def _stages_of(program: Program, name: str) -> StageLayout | None:
    """Return which stage of a pipeline holds the layers of a leaf of the body."""
    ranks, chunks = program.mesh.shape["pipeline"], program.config.parallel.pipeline_chunks
    if ranks == 1 or not name.startswith("body."):
        return None
    return body_stages(program.config.model, ranks, chunks)


def staged(program: Program, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return leaves [layers, ...] as the program's states have them, padding layers zero."""

    def one(name: str, leaf: np.ndarray) -> np.ndarray:
        stages = _stages_of(program, name)
        if stages is None:
            return np.asarray(leaf)
        is_layer = np.expand_dims(stages.layers != PADDING_LAYER, tuple(range(-leaf.ndim + 1, 0)))
        return np.where(is_layer, np.asarray(leaf)[stages.layers], 0).astype(leaf.dtype)

    return {name: one(name, leaf) for name, leaf in leaves.items()}


def unstaged(program: Program, leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return leaves of a state as [layers, ...], and check that padding layers hold zeros."""

    def one(name: str, leaf: np.ndarray) -> np.ndarray:
        stages = _stages_of(program, name)
        if stages is None:
            return leaf
        assert not leaf[stages.layers == PADDING_LAYER].any(), (
            f"{name} is not zero in a padding layer"
        )
        layers = np.empty((stages.num_layers, *leaf.shape[3:]), leaf.dtype)
        layers[stages.layers[stages.layers != PADDING_LAYER]] = leaf[stages.layers != PADDING_LAYER]
        return layers

    return {name: one(name, np.array(leaf)) for name, leaf in leaves.items()}


def state_of(program: Program, main: Mapping[str, np.ndarray], **others: Any) -> State:
    """Return a first state with these main weights; `others` replaces what else it holds."""
    abstract = jax.eval_shape(partial(first_state, program.layout))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    main = staged(program, main)
    weights = {name: main[name].astype(leaf.dtype) for name, leaf in abstract.weights.items()}
    state = zeros._replace(main=main, weights=weights)._replace(**others)
    return jax.device_put(state, shardings(program.mesh, program.specs), may_alias=False)


def host(tree: Any) -> Any:
    """Return a tree as NumPy arrays of their own: a donated buffer would take a view with it."""
    return jax.tree.map(np.array, tree)


def gradients_of(program: Program, state: State, grad_norm: float) -> dict[str, np.ndarray]:
    """Return the gradients of the one step that `state` has taken, read off its first moment."""
    optim = program.config.optim
    scale = float(clip_coefficient(jnp.float32(grad_norm), optim.max_grad_norm))
    moments = unstaged(program, state.opt_state.mu)
    return {
        name: np.array(leaf, np.float64) / ((1 - optim.betas[0]) * scale)
        for name, leaf in moments.items()
    }


@cache
def _oracle(config: Config) -> Any:
    execution = one_device(seed=config.seed, training=True)

    def value(trained: Any, others: Any, blocks: Batch, step: Any):
        def sums_of(block: Batch):
            params = by_period(config.model, {**trained, **others})
            return batch_sums(config, params, block, execution, step)

        sums = jax.lax.map(sums_of, blocks)
        sums = jax.tree.map(lambda value: value.sum(axis=0, dtype=value.dtype), sums)
        counts = (jnp.maximum(number, 1).astype(jnp.float32) for number in count(blocks))
        parts = divide(sums, Divisors(*counts))
        return total(config, parts), (parts, sums.router and sums.router.counts)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def oracle(
    config: Config, params: Mapping[str, Any], batch: Batch, *, step: int = 0, num_blocks: int = 1
) -> tuple[LossParts, np.ndarray, dict[str, np.ndarray]]:
    """Return parts, expert counts and gradients on one device, without a collective or a drop.

    With `num_blocks=1` it is `olmo_jax.model.objective`. A balance loss whose scope is not a row
    depends on how the rows are taken together: then they go through the model block by block.
    """
    model = config.model.model_copy(update={"dtype": "float32"})
    plain = Config(model=model, train=config.train, seed=config.seed)
    trained = {name: leaf for name, leaf in params.items() if "score_bias" not in name}
    others = {name: leaf for name, leaf in params.items() if "score_bias" in name}
    blocks = jax.tree.map(lambda value: value.reshape(num_blocks, -1, *value.shape[1:]), batch)
    (_, (parts, counts)), gradients = _oracle(plain)(trained, others, blocks, jnp.int32(step))
    return LossParts(*host(tuple(parts))), np.array(counts), host(gradients)


def norm_of(gradients: Mapping[str, np.ndarray]) -> float:
    """Return the global norm, summed in FP64."""
    return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values())))


def distances(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return each leaf's relative L2 distance."""
    assert found.keys() == wanted.keys()
    tiny_norm = 1e-30
    return {
        name: float(
            np.linalg.norm((np.asarray(found[name], np.float64) - wanted[name]).ravel())
            / max(np.linalg.norm(np.asarray(wanted[name], np.float64).ravel()), tiny_norm)
        )
        for name in wanted
    }


def assert_close(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Compare leaf by leaf, by relative L2 distance."""
    far = {name: d for name, d in distances(found, wanted).items() if not d <= tolerance}
    assert not far, far


def train_on_one_device(
    config: Config, main: Mapping[str, np.ndarray], batches: Sequence[Batch], rates: Sequence[float]
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Return the metrics of a plain loop of oracle, clip and AdamW, and the weights after it."""
    main = dict(jax.tree.map(jnp.asarray, dict(main)))
    adam, decay = optimizer(config.optim), decay_mask(main, config.optim.no_decay)
    opt_state = adam.init(main)
    layers = config.model.num_routed_layers
    # Random assignment does not read it.
    bias = {EXPERT_BIAS: np.zeros((layers, config.model.num_experts), np.float32)}
    weight_decay = config.optim.weight_decay
    move = jax.jit(partial(update, adam, weight_decay=weight_decay, decay=decay))
    lines = []
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        parts, counts, gradients = oracle(config, {**main, **bias}, batch, step=step)
        norm = norm_of(gradients)
        scale = clip_coefficient(jnp.float32(norm), config.optim.max_grad_norm)
        clipped = {name: leaf * scale for name, leaf in gradients.items()}
        main, opt_state = move(clipped, opt_state, main, lr=jnp.float32(rate))
        lines.append(
            {
                "loss": float(parts.cross_entropy),
                "z_loss": float(parts.z),
                "balance_loss": float(parts.balance) / layers,
                "router_z_loss": float(parts.router_z) / layers,
                "grad_norm": norm,
                "tokens": int(batch.padding_mask.sum()),
                "max_load": float((counts.max(-1) / counts.mean(-1)).max()),
            }
        )
    return lines, host(main)


def bf16_on_eight(num_microbatches: int, parallel: Mapping[str, Any] | None = None) -> Config:
    """Return the config whose programs are looked into: bf16, experts over 4 of 8 devices.

    With FSDP, over 2 of them: each is in a group of 4 that shards, and there are two such groups.
    """
    mesh = {"data": 2, "fsdp": 2, "expert": 2} if parallel else {"data": 2, "expert": 4}
    rows = 8 * num_microbatches
    return tiny(mesh, model={"dtype": "bfloat16"}, global_batch=rows, parallel=parallel)
