"""Self-attention of a block: projections, norms of queries and keys, rotary positions, gate."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from olmo_jax.config.records import ModelConfig
from olmo_jax.model.execution import WHOLE_ROWS, Attend
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.norm import optional_norm
from olmo_jax.model.rope import attention_factor, inverse_frequencies, is_rotated, is_scaled, rotate
from olmo_jax.ops.linear import linear


def _add_bias(x: Float[Array, "..."], bias: nnx.Variable | None) -> Float[Array, "..."]:
    """Add in FP32, so that the gradient of the bias is a sum in FP32."""
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)


def scale_by_visible(
    q: Float[Array, "B L N H"], positions: Int[Array, "B L"], scale: Float32[Array, " N"]
) -> Float[Array, "B L N H"]:
    """Multiply the query by log(position + 1) times its head's scale: scalable softmax.

    The count is of the document, whatever the window; a document's first query becomes 0.
    Source: olmo_core 3.0.0, nn/attention, Attention._apply_scalable_softmax.
    Differs: the logarithm is not rounded to the dtype of the query.
    """
    visible = jnp.log((positions + 1).astype(jnp.float32))[..., None, None]
    return (q.astype(jnp.float32) * (visible * scale[:, None])).astype(q.dtype)


class Attention(nnx.Module):
    """Grouped-query attention inside a document; the layer's window is an argument of the call.

    Source: olmo_core 3.0.0, nn/attention.
    """

    def __init__(self, model: ModelConfig, make: Initialiser):
        self.model = model
        self.q, self.k, self.v, self.out = make("q"), make("k"), make("v"), make("out")
        self.q_bias, self.k_bias = make.optional("q_bias"), make.optional("k_bias")
        self.v_bias, self.out_bias = make.optional("v_bias"), make.optional("out_bias")
        # `full` normalises all heads together.
        norm = partial(
            optional_norm, make, eps=model.norm_eps, num_dims=2 if model.qk_norm == "full" else 1
        )
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")
        self.gate = make.optional("gate")
        self.softmax_scale = make.optional("softmax_scale")

    def _project(
        self, name: str, x: Float[Array, "B L D"], weight: nnx.Variable, bias: nnx.Variable | None
    ) -> Float[Array, "B L heads H"]:
        projected = _add_bias(checkpoint_name(linear(x, weight[...]), name), bias)
        limit = self.model.clip_qkv
        return projected if limit is None else jnp.clip(projected, -limit, limit)

    def _rotate(
        self, x: Float[Array, "B L heads H"], positions: Int[Array, "B L"], window: int | None
    ) -> Float[Array, "B L heads H"]:
        rope = self.model.rope
        if not is_rotated(rope, window):
            return x
        scaled = is_scaled(rope, window)
        return rotate(
            x,
            positions,
            inverse_frequencies(rope, self.model.head_dim, scaled=scaled),
            factor=attention_factor(rope, scaled=scaled),
            full_precision=rope.full_precision,
        )

    def _gated(
        self, attended: Float[Array, "B L N H"], x: Float[Array, "B L D"]
    ) -> Float[Array, "B L N H"]:
        """Multiply by the sigmoid of a projection of the attention's input."""
        if self.gate is None:
            return attended
        logits = checkpoint_name(linear(x, self.gate[...]), "attention_gate")
        if self.model.attention_gate_full_precision:
            logits = logits.astype(jnp.float32)
        gate = jax.nn.sigmoid(logits).astype(attended.dtype)
        return attended * (gate[..., None] if gate.ndim < attended.ndim else gate)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        *,
        positions: Int[Array, "B L"],
        segment_ids: Int[Array, "B row"] | None,
        window: int | None,
        attend: Attend = WHOLE_ROWS.attend,
    ) -> Float[Array, "B L D"]:
        q = self._project("query", x, self.q, self.q_bias)
        k = self._project("key", x, self.k, self.k_bias)
        v = self._project("value", x, self.v, self.v_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, positions, window), self._rotate(k, positions, window)
        if self.softmax_scale is not None:
            q = scale_by_visible(q, positions, self.softmax_scale[...])
        attended = attend(
            q,
            k,
            v,
            segment_ids=segment_ids,
            window=window,
            scale=self.model.head_dim**-0.5,
        )
        out = linear(self._gated(attended, x), self.out[...], 2)
        return _add_bias(checkpoint_name(out, "attention_output"), self.out_bias)
