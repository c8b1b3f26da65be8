"""Which weights decay."""

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.records import ModelConfig, OptimConfig
from olmo_jax.optim.decay import decay_mask


def test_matrices_router_and_head_decay_and_the_embedding_norms_and_vectors_do_not():
    everything = ModelConfig(num_layers=2, attention_bias=True, scalable_softmax=True)
    mask = decay_mask(parameters(everything), OptimConfig().no_decay)
    assert mask["head.weight"]
    assert not mask["embedding.weight"]
    for name, decays in mask.items():
        vector = "norm" in name or "bias" in name or "softmax_scale" in name
        assert decays != (vector or name.startswith("embedding."))


def test_a_pattern_is_for_the_whole_dotted_name():
    names = ["body.attention.q", "leading.0.attention.q", "body.attention.q_bias"]
    assert decay_mask(names, ("body.*.q",)) == dict(zip(names, (False, True, True), strict=True))


def test_no_pattern_means_that_all_decay():
    assert decay_mask(["head.weight"], ()) == {"head.weight": True}
