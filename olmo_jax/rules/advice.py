"""What a valid config does that its author hardly wants: worth a warning, no error."""

from collections.abc import Callable, Iterator

from olmo_jax.arch.layers import window_of
from olmo_jax.config.messages import show
from olmo_jax.config.records import Config


def router_that_cannot_learn(config: Config) -> Iterator[str]:
    """Name what makes the weight of a token's only expert 1, whatever the router says.

    The loss reaches the router through the combine weights alone. One expert has no choice.
    """
    model, router = config.model, config.model.router
    if model.num_routed_layers == 0 or model.top_k != 1 or model.num_experts == 1:
        return
    if router.gating == "topk_softmax":
        key, write = "gating=topk_softmax", "model.router.gating=softmax"
        if router.normalize is not None:
            write += " with model.router.normalize=null"
    elif router.normalize is not None:
        key, write = f"normalize={show(router.normalize)}", "model.router.normalize=null"
    else:
        return
    yield (
        f"model.router.{key} with model.top_k=1 makes the weight of a token's only expert 1 "
        "whatever its score is, so the loss has no gradient for the router and it cannot learn "
        "which expert is better; "
        f"write {write}, or model.top_k=2 or more"
    )


def export_by_layer_type(config: Config) -> Iterator[str]:
    """Name a rotary rule that full and sliding layers do not share: it cannot be exported."""
    rope = config.model.rope
    windows = [window_of(config.model, layer) for layer in range(config.model.num_layers)]
    mixed = None in windows and any(windows)
    if mixed and rope.on_full_attention and rope.scaling != "none" and rope.scaled_layers == "full":
        yield (
            f"model.rope.scaling={rope.scaling} with model.rope.scaled_layers=full beside the "
            "sliding layers of model.windows.pattern trains, but `checkpoint export-weights` "
            "refuses it: transformers loads other frequencies; write model.rope.scaled_layers=all "
            "for a model that is to be exported"
        )


ADVICE: tuple[Callable[[Config], Iterator[str]], ...] = (
    router_that_cannot_learn,
    export_by_layer_type,
)


def advice(config: Config) -> list[str]:
    """Return a warning for each thing that a config does and its author hardly wants."""
    return [text for rule in ADVICE for text in rule(config)]
