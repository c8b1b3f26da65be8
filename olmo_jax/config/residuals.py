"""The named results of a unit that its backward pass may keep, and which of them it keeps."""

from collections.abc import Mapping

from olmo_jax.config.records import Config

GATHERED = "gathered_weight"
"""A weight as FSDP gathered it, in the compute dtype."""

ATTENTION = (
    "query",
    "key",
    "value",
    "attention_gate",
    "exchanged_query",
    "exchanged_key_value",
    "attention",
    "attention_logsumexp",
    "exchanged_attention",
)
EXPERTS = ("expert_hidden", "expert_output")

NAMES: Mapping[str, str] = {
    "embedding": "the rows of the embedding, before their scale and norm",
    "query": "the query projection, before bias, norm and rotation",
    "key": "the key projection",
    "value": "the value projection",
    "attention_gate": "the logits of the attention's gate",
    "exchanged_query": "Ulysses: queries of whole rows, of this rank's heads",
    "exchanged_key_value": "Ulysses: their keys and values",
    "attention": "what each head attended to",
    "attention_logsumexp": "the softmax's normaliser of each query",
    "exchanged_attention": "Ulysses: what all heads attended to, of this rank's positions",
    "attention_output": "the attention's output projection",
    "mlp_hidden": "up and gate of a dense block's MLP",
    "mlp_output": "its output",
    "shared_hidden": "up and gate of the shared expert",
    "shared_output": "its output",
    "router_logits": "the router's logits, FP32",
    "balance_counts": "the counts that the balance loss multiplies",
    "route_plan": "which row goes where",
    "expert_rows": "rows as they arrived at the experts",
    "expert_hidden": "up and gate of the routed experts",
    "expert_output": "what the routed experts return",
    "combined": "each token's weighted sum of its rows",
    "head_normaliser": "the log-sum-exp of each token's logits",
}
"""The results that can be computed again, and what each name stands for."""

ALWAYS_KEPT = ("router_choice", "router_weights")
"""The experts of each token and how much each counts. XLA may round a value otherwise where it is
computed again, and another rounding could be another expert: both passes must see one routing.
"""

_OUTSIDE_BLOCKS = ("embedding", "head_normaliser")

REGIONS = {
    "none": (),
    "block": tuple(name for name in NAMES if name not in _OUTSIDE_BLOCKS),
    "attention": ATTENTION,
    "experts": EXPERTS,
}
"""Per value of `train.recompute`, the names that are computed again."""


def present(config: Config) -> frozenset[str]:
    """Return the names that a result of this model has."""
    model = config.model
    lacking = {
        "attention_gate": model.attention_gate == "none",
        "exchanged": config.mesh.sequence == 1 or config.parallel.context != "ulysses",
        "mlp": model.num_dense_layers == 0,
        "shared": model.num_routed_layers == 0 or not model.shared_hidden,
        **dict.fromkeys(
            ("router_logits", "balance_counts", "route_plan", "expert", "combined"),
            model.num_routed_layers == 0,
        ),
    }
    absent = tuple(prefix for prefix, lacks in lacking.items() if lacks)
    return frozenset(name for name in NAMES if not name.startswith(absent))


def recomputed(config: Config) -> frozenset[str]:
    """Return the names that the backward pass computes again."""
    policy = config.train.recompute
    return frozenset(REGIONS[policy] if isinstance(policy, str) else policy)


def kept(config: Config) -> frozenset[str]:
    """Return the names that the forward pass keeps for the backward pass."""
    names = frozenset(NAMES) - recomputed(config) | {*ALWAYS_KEPT}
    parallel = config.parallel
    held = parallel.method == "fsdp" and parallel.reshard == "after_backward"
    return names | {GATHERED} if held else names
