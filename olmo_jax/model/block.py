"""A transformer block: attention and the position-wise half, with norms before, after or around."""

from flax import nnx
from jaxtyping import Array, Float, Int32

from olmo_jax.config.records import ModelConfig
from olmo_jax.model.attention import Attention
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.moe import MLP, MoE, RouterSums, Surroundings
from olmo_jax.model.norm import RMSNorm
from olmo_jax.model.placement import Placement


def _norm(
    model: ModelConfig, make: Initialiser, name: str, wanted: tuple[str, ...]
) -> RMSNorm | None:
    if model.norm not in wanted:
        return None
    return RMSNorm(make.inside(name), (model.d_model,), ("d_model",), eps=model.norm_eps)


def _apply(norm: RMSNorm | None, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return x if norm is None else norm(x)


class Block(nnx.Module):
    """h = x + n1(A(m1(x))), y = h + n2(F(m2(h))): `peri` has all norms, `pre` m, `reordered` n.

    Source: olmo_core 3.0.0, nn/ddp/block.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser, *, routed: bool):
        before, after = ("pre", "peri"), ("reordered", "peri")
        self.attention_input_norm = _norm(model, make, "attention_input_norm", before)
        self.attention = Attention(model, make.inside("attention"))
        self.attention_output_norm = _norm(model, make, "attention_output_norm", after)
        self.mlp_input_norm = _norm(model, make, "mlp_input_norm", before)
        self.mlp_output_norm = _norm(model, make, "mlp_output_norm", after)
        self.moe = MoE(model, make.inside("moe")) if routed else None
        self.mlp = None if routed else MLP(model, make.inside("mlp"), model.dense_hidden, "mlp")

    def __call__(
        self,
        x: Float[Array, "B L D"],
        around: Surroundings,
        placement: Placement,
        *,
        window: int | None,
        layer: Int32[Array, ""],
        seed: int,
        training: bool,
    ) -> tuple[Float[Array, "B L D"], RouterSums | None]:
        attended = self.attention(
            _apply(self.attention_input_norm, x),
            positions=around.positions,
            segment_ids=around.segment_ids,
            window=window,
            attend=placement.rows.attend,
        )
        h = x + _apply(self.attention_output_norm, attended)
        inner = _apply(self.mlp_input_norm, h)
        if self.mlp is not None:
            return h + _apply(self.mlp_output_norm, self.mlp(inner)), None
        assert self.moe is not None
        y, sums = self.moe(inner, around, placement, layer=layer, seed=seed, training=training)
        return h + _apply(self.mlp_output_norm, y), sums
