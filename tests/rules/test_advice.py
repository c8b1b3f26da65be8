"""A valid config whose author hardly wants what it does is told so."""

from itertools import product

import jax
import numpy as np
import pytest

from olmo_jax.config.records import Config
from olmo_jax.config_file import typed
from olmo_jax.errors import UserError
from olmo_jax.interop.expressible import check_expressible
from olmo_jax.model.router import route
from olmo_jax.plan.summary import summary, warnings
from olmo_jax.rules import advice

GATINGS = ("softmax", "topk_softmax", "sigmoid")
NORMS = ("null", "1.0", "2.0", "0.5")


def combine_weights(config: Config) -> np.ndarray:
    """Return the combine weights of tokens that the router scores differently."""
    model = config.model
    x, weight = (jax.random.normal(jax.random.key(n), (8, 6)) for n in range(2))
    routing = route(
        x[None],
        weight[: model.num_experts],
        bias=None,
        score_bias=None,
        config=model.router,
        top_k=model.top_k,
    )
    return np.asarray(routing.weights)


@pytest.mark.parametrize(
    ("gating", "normalize", "top_k"), list(product(GATINGS, NORMS, (1, 2, 8))), ids=str
)
@pytest.mark.parametrize("restore", ["true", "false"])
def test_a_router_is_named_if_no_score_changes_a_weight(gating, normalize, top_k, restore):
    keys = {"gating": gating, "normalize": normalize, "restore_weight_scale": restore}
    keys |= {"expert_weight_scale": "2.5", "original_top_k": "4"}
    overrides = [f"model.router.{key}={value}" for key, value in keys.items()]
    config = typed(None, [*overrides, f"model.top_k={top_k}"])
    constant = np.ptp(combine_weights(config)) < 1e-5
    assert bool(advice(config)) == constant


@pytest.mark.parametrize("gating", GATINGS)
def test_what_a_router_that_cannot_learn_is_told_to_write_helps(gating):
    given = ["model.top_k=1", f"model.router.gating={gating}", "data.sources=[{path: tokens}]"]
    config = typed(None, given)
    [text] = advice(config)
    assert "model.top_k=1" in text
    assert f"model.router.{'gating' if gating == 'topk_softmax' else 'normalize'}=" in text
    overrides = text.split("; write ")[1].split(", or ")[0].split(" with ")
    better = typed(None, [*given, *overrides])
    assert advice(better) == []
    assert np.ptp(combine_weights(better)) > 1e-5
    assert text in warnings(config)
    assert text in summary(config)


@pytest.mark.parametrize(
    "overrides", [["model.num_experts=1"], ["model.num_dense_layers=4"]], ids=str
)
def test_a_router_without_a_choice_is_not_named(overrides):
    assert advice(typed(None, ["model.top_k=1", *overrides])) == []


@pytest.mark.parametrize("scaling", ["none", "abf", "pi", "stepwise", "yarn"])
@pytest.mark.parametrize("layers", ["full", "all"])
@pytest.mark.parametrize("windows", ["[]", "[8]", "[8, -1]"])
@pytest.mark.parametrize("ends", ["true", "false"])
def test_what_export_refuses_of_rotary_rules_and_windows_is_said_before(
    scaling, layers, windows, ends
):
    keys = {"rope.scaling": scaling, "rope.scaled_layers": layers, "windows.pattern": windows}
    keys |= {"rope.original_length": "64"}  # YaRN's ramp ends inside the head
    keys |= {f"windows.force_full_{end}": ends for end in ("first", "last")}
    config = typed(None, [f"model.{key}={value}" for key, value in keys.items()])
    by_layer_type = layers == "full" and scaling != "none"
    by_layer_type &= windows == "[8, -1]" or (windows == "[8]" and ends == "true")
    texts = advice(config)
    assert len(texts) == by_layer_type
    if by_layer_type:
        assert "scaled_layers=all" in texts[0]
        with pytest.raises(UserError, match=rf"scaling={scaling} .*scaled_layers=all"):
            check_expressible(config.model)
    else:
        check_expressible(config.model)
