"""The published model sizes, as far as counting needs them."""

from olmo_jax.config.records import ModelConfig


def recipe(num_layers, num_dense_layers, d_model, num_heads, num_kv_heads, num_experts, hidden):
    """Return a model of the report's shape: top-4, one shared expert, dense blocks as wide."""
    return ModelConfig(
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        num_experts=num_experts,
        top_k=4,
        expert_hidden=hidden,
        shared_hidden=hidden,
        dense_hidden=5 * hidden,
        vocab_size=100_352,
    )


RECIPES = {
    "Tiny-64E": recipe(16, 1, 2048, 16, 4, 64, 2048),
    "Small-64E": recipe(32, 1, 2560, 24, 6, 64, 2560),
    "Medium-64E": recipe(39, 2, 3072, 32, 8, 64, 3072),
    "Medium-96E": recipe(39, 2, 3072, 32, 8, 96, 3072),
    "Medium-128E": recipe(39, 2, 3072, 32, 8, 128, 3072),
    "Large-128E": recipe(47, 2, 4096, 40, 10, 128, 4096),
    "Ultra-128E": recipe(63, 2, 6144, 64, 32, 128, 8192),
    "Ultra-256E": recipe(63, 2, 6144, 64, 32, 256, 8192),
    "Bench-8E": recipe(8, 1, 4096, 32, 8, 8, 4096),
    "Bench-64E": recipe(8, 1, 4096, 32, 8, 64, 4096),
    "Bench-128E": recipe(8, 1, 4096, 32, 8, 128, 4096),
}
