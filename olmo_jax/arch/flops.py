"""Floating-point operations that a model needs, from its config alone: model FLOPs. No jax.

The convention: a product of [m, k] and [k, n] is `2 m k n`, its backward pass twice that; nothing
but matrix products counts (no norm, softmax, rotation or bias). *Model* FLOPs are those that a
model needs and no more: attention over the pairs that causality and the window allow in an unbroken
sequence (packing does not make it cheaper), `top_k` experts a token, no lookup in the embedding,
nothing for rematerialization, padding, dropped or masked tokens. *Hardware* FLOPs, those of every
product in the program of a step, needed or not, are counted in `plan/flops.py`.

Source: olmo_core 3.0.0, OLMoDDPModel.num_flops_per_token.
Differs: there the gains and biases of attention and the final norm count as 6 each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from olmo_jax.arch.layers import is_routed, window_of
from olmo_jax.config.records import ModelConfig


@dataclass(frozen=True)
class Flops:
    forward: int = 0
    backward: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.forward * times, self.backward * times)

    def __floordiv__(self, parts: int) -> "Flops":
        return Flops(self.forward // parts, self.backward // parts)

    @property
    def total(self) -> int:
        return self.forward + self.backward


def matmul(m: int, k: int, n: int) -> Flops:
    """Return the FLOPs of [m, k] times [k, n], and of the gradients of both factors."""
    return Flops(2 * m * k * n, 4 * m * k * n)


def attended_pairs(length: int, window: int | None) -> int:
    """Return a sequence's (query, key) pairs: causal, the last `window` keys if given."""
    #     k . . . .
    #     k k . . .     window 3 of 5: a triangle of the first 3 queries, then 3 keys a query:
    #     k k k . .     3 * 4 / 2 + 2 * 3
    #     . k k k .
    #     . . k k k
    width = length if window is None else min(window, length)
    return width * (width + 1) // 2 + (length - width) * width


def gate_width(model: ModelConfig) -> int:
    """Return how many numbers the attention's gate has a head."""
    return {"none": 0, "headwise": 1, "elementwise": model.head_dim}[model.attention_gate]


def attention_projections(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of one layer's query, key, value, gate and output products."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    width = heads * model.head_dim + model.num_heads * gate_width(model)
    return matmul(tokens, model.d_model, width)


def attention_scores(model: ModelConfig, pairs: int) -> Flops:
    """Return the FLOPs of one layer's scores, `pairs` of all heads, and of those times values."""
    # A pair is one dot product of head_dim numbers, and as much for its weight times the value.
    one = matmul(pairs, model.head_dim, 1)
    return one + one


def router(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of one layer's router logits."""
    return matmul(tokens, model.d_model, model.num_experts)


def mlp(model: ModelConfig, hidden: int, rows: int) -> Flops:
    """Return the FLOPs of `rows` rows through one gated MLP: up, gate and down."""
    return matmul(rows, model.d_model, 3 * hidden)


def head(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of the logits."""
    return matmul(tokens, model.d_model, model.vocab_size)


def _layer(
    model: ModelConfig, layer: int, tokens: int, pairs: Callable[[int | None], int], rows: int
) -> dict[str, Flops]:
    attention = {
        "attention_projections": attention_projections(model, tokens),
        "attention_scores": attention_scores(model, pairs(window_of(model, layer))),
    }
    if not is_routed(model, layer):
        return attention | {"dense_mlp": mlp(model, model.dense_hidden, tokens)}
    return attention | {
        "router": router(model, tokens),
        "routed_experts": mlp(model, model.expert_hidden, rows),
        "shared_expert": mlp(model, model.shared_hidden, tokens),
    }


def of_layers(
    model: ModelConfig,
    runs: Iterable[tuple[int, int]],
    *,
    tokens: int,
    pairs: Callable[[int | None], int],
    rows: int,
) -> dict[str, Flops]:
    """Return the FLOPs of the layers of `runs`, each as often as it says, by kind of product."""
    sums: dict[str, Flops] = {}
    for layer, times in runs:
        for kind, part in _layer(model, layer, tokens, pairs, rows).items():
            sums[kind] = sums.get(kind, Flops()) + part * times
    return sums


def components(
    model: ModelConfig, *, tokens: int, pairs: Callable[[int | None], int], rows: int
) -> dict[str, Flops]:
    """Return the FLOPs of each kind of product, summed over the layers.

    `pairs(window)` are the (head, query, key) that a layer with this window computes for all its
    `tokens`, `rows` the rows that pass a layer's routed experts: with the numbers that a model
    needs this is its own work, with those of a program (all pairs of its blocks, whole tiles) what
    that executes.
    """
    runs = ((layer, 1) for layer in range(model.num_layers))
    layers = of_layers(model, runs, tokens=tokens, pairs=pairs, rows=rows)
    return layers | {"head": head(model, tokens)}


def model_flops(model: ModelConfig, sequence_length: int) -> dict[str, Flops]:
    """Return the model FLOPs of one sequence, by kind of product."""
    return components(
        model,
        tokens=sequence_length,
        pairs=lambda window: model.num_heads * attended_pairs(sequence_length, window),
        rows=sequence_length * model.top_k,
    )


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the model FLOPs, forward and backward, of training on one token."""
    return (
        sum(part.total for part in model_flops(model, sequence_length).values()) / sequence_length
    )
