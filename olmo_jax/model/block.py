"""A transformer block: attention and the position-wise half, with norms before, after or around."""

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int32

from olmo_jax.config.records import ModelConfig
from olmo_jax.model.attention import Attention
from olmo_jax.model.execution import Execution
from olmo_jax.model.initialise import Initialiser
from olmo_jax.model.moe import MLP, BlockInputs, MoE, RouterSums
from olmo_jax.model.norm import RMSNorm, optional_norm


def _apply(norm: RMSNorm | None, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return x if norm is None else norm(x)


class Block(nnx.Module):
    """h = x + n1(A(m1(x))), y = h + n2(F(m2(h))): `peri` has all norms, `pre` m, `reordered` n.

    Source: olmo_core 3.0.0, nn/ddp/block.py.
    """

    def __init__(self, model: ModelConfig, make: Initialiser, *, routed: bool):
        norm = partial(optional_norm, make, eps=model.norm_eps)
        self.attention_input_norm = norm("attention_input_norm")
        self.attention = Attention(model, make.inside("attention"))
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_input_norm = norm("mlp_input_norm")
        self.mlp_output_norm = norm("mlp_output_norm")
        self.moe = MoE(model, make.inside("moe")) if routed else None
        self.mlp = None if routed else MLP(make.inside("mlp"), "mlp")

    def __call__(
        self,
        x: Float[Array, "B L D"],
        inputs: BlockInputs,
        execution: Execution,
        layer: Int32[Array, ""],
        *,
        window: int | None,
    ) -> tuple[Float[Array, "B L D"], RouterSums | None]:
        attended = self.attention(
            _apply(self.attention_input_norm, x),
            positions=inputs.positions,
            segment_ids=inputs.segment_ids,
            window=window,
            attend=execution.rows.attend,
        )
        h = x + _apply(self.attention_output_norm, attended)
        inner = _apply(self.mlp_input_norm, h)
        if self.mlp is not None:
            return h + _apply(self.mlp_output_norm, self.mlp(inner)), None
        assert self.moe is not None
        y, sums = self.moe(inner, inputs, execution, layer)
        return h + _apply(self.mlp_output_norm, y), sums
