"""Rotary positions: frequencies by four rules of context extension, and the rotation."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from olmo_jax.config.records import RopeConfig


def _geometric(theta: float, num_dims: int) -> np.ndarray:
    return theta ** -(np.arange(0, num_dims, 2, dtype=np.float64) / num_dims)


def _abf(rope: RopeConfig, num_dims: int) -> np.ndarray:
    return _geometric(rope.scaled_theta, num_dims)


def _interpolated(rope: RopeConfig, num_dims: int) -> np.ndarray:
    return _geometric(rope.theta, num_dims) / rope.factor


def _stepwise(rope: RopeConfig, num_dims: int) -> np.ndarray:
    """Divide long wavelengths by the factor, keep short ones, blend in between (Llama 3.1)."""
    # periods: how often a pair turns over the original length. Above `high` it is kept, below `low`
    # divided by the factor, between them a mixture that is linear in the number of turns.
    inverse = _geometric(rope.theta, num_dims)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    periods = rope.original_length * inverse / (2 * math.pi)
    kept = np.clip((periods - low) / (high - low), 0.0, 1.0)
    return inverse * kept + inverse / rope.factor * (1.0 - kept)


def _yarn_dim(rope: RopeConfig, num_dims: int, rotations: float) -> float:
    """Return the (fractional) dim that turns `rotations` times over the original length."""
    # Pair d turns L theta^(-2 d / n) / (2 pi) times over L positions. Solved for d.
    ratio = math.log(rope.original_length / (2 * math.pi * rotations))
    return num_dims * ratio / (2 * math.log(rope.theta))


def _yarn(rope: RopeConfig, num_dims: int) -> np.ndarray:
    inverse = _geometric(rope.theta, num_dims)
    low = max(math.floor(_yarn_dim(rope, num_dims, rope.beta_fast)), 0)
    high = min(math.ceil(_yarn_dim(rope, num_dims, rope.beta_slow)), num_dims // 2 - 1)
    ramp = np.clip((np.arange(num_dims // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1.0 - ramp)


_RULES = {"abf": _abf, "pi": _interpolated, "stepwise": _stepwise, "yarn": _yarn}


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, scaled: bool) -> np.ndarray:
    """Return the angle per position of each rotated pair of dims, float32.

    Shapes: [int(head_dim * partial) / 2]; the dims after them are not rotated.
    Source: olmo_core 3.0.0, nn/rope.py.
    Differs: computed in float64 and rounded once.
    """
    num_dims = int(head_dim * rope.partial)
    if scaled and rope.scaling != "none":
        return _RULES[rope.scaling](rope, num_dims).astype(np.float32)
    return _geometric(rope.theta, num_dims).astype(np.float32)


def attention_factor(rope: RopeConfig, *, scaled: bool) -> float:
    """Return the factor on cosine and sine, so that the logits scale by its square (YaRN)."""
    return 0.1 * math.log(rope.factor) + 1.0 if scaled and rope.scaling == "yarn" else 1.0


def is_rotated(rope: RopeConfig, window: int | None) -> bool:
    """Say whether a layer with this window has rotary positions at all."""
    return rope.on_full_attention or window is not None


def is_scaled(rope: RopeConfig, window: int | None) -> bool:
    """Say whether the scaling rule holds for a layer with this window."""
    return rope.scaled_layers == "all" or window is None


def rotate(
    x: Float[Array, "B L N H"],
    positions: Int[Array, "B L"],
    inverse: Float32[np.ndarray, " pairs"],
    *,
    factor: float = 1.0,
    full_precision: bool = True,
) -> Float[Array, "B L N H"]:
    """Turn the pairs (i, i + pairs) of the leading dims of `x` by position times frequency.

    `full_precision` turns in FP32 and rounds once; else cosine and sine have the dtype of `x`.
    Source: olmo_core 3.0.0, nn/rope.py, RotaryEmbedding (halves, not interleaved).
    """
    dtype = jnp.float32 if full_precision else x.dtype
    angles = positions[..., None, None].astype(jnp.float32) * inverse
    cosine, sine = (
        (factor * jnp.cos(angles)).astype(dtype),
        (factor * jnp.sin(angles)).astype(dtype),
    )
    num_pairs = inverse.shape[0]
    rotated, rest = x[..., : 2 * num_pairs].astype(dtype), x[..., 2 * num_pairs :]
    # A product of complex numbers: (first + i second) (cosine + i sine).
    first, second = jnp.split(rotated, 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate([*(half.astype(x.dtype) for half in turned), rest], axis=-1)
