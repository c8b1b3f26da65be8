"""What a user reads about one wrong key: key and value, the rule, what to write instead."""

import pytest
from pydantic import ValidationError

from olmo_jax.config.messages import divisors, faults
from olmo_jax.config.records import Config
from olmo_jax.config_file import load
from olmo_jax.errors import UserError


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load(None, overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("model.num_layer=3", "model.num_layers"),
        ("model.n_kv_heads=3", "model.num_kv_heads"),
        ("model.router.gatting=softmax", "model.router.gating"),
        ("optim.schedule.warm_up=3", "optim.schedule.warmup"),
        ("model.capacity_factor=2", "parallel.capacity_factor"),
        ("train.lr=0.1", "optim.lr"),
        ("train.seed=1", "seed"),
        ("steps=10", "train.steps"),
        ("model.window=[4]", "model.windows"),
        ("meshes.data=2", "mesh"),
        ("modle.router.gating=softmax", "model"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(override, nearest):
    assert message(override).endswith(f"is not a known key; the nearest known key is {nearest}")


def test_key_like_no_other_lists_its_section():
    text = message("mesh.replicas=2")
    assert "mesh.replicas=2 is not a known key" in text
    assert "pipeline, data, fsdp, expert, sequence and platform" in text


def test_unknown_key_inside_a_list_names_its_place():
    text = message("data.sources=[{path: a}, {path: b, wieght: 2}]")
    assert text == (
        "data.sources.1.wieght=2 is not a known key; the nearest known key is data.sources.1.weight"
    )


@pytest.mark.parametrize(
    "override", ["mesh.tensor=2", "parallel.tensor_parallel=2", "mesh.tp=4", "parallel.method=tp"]
)
def test_tensor_parallelism_is_told_why_and_what_instead(override):
    text = message(override)
    assert text.startswith(f"{override} asks for tensor parallelism")
    assert "fight expert parallelism" in text
    assert "mesh.expert" in text
    assert "mesh.data" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_layers=0", "model.num_layers=0 is below 1; use 1 or more"),
        ("model.num_layers=true", "model.num_layers=true is not a whole number; write an integer"),
        ("train.steps=1.5", "train.steps=1.5 is not a whole number; write an integer"),
        ("optim.lr=-1", "optim.lr=-1 is below 0; use 0 or more"),
        ("optim.lr=fast", "optim.lr=fast is not a number; write a number"),
        ("optim.eps=0", "optim.eps=0 is not above 0; use a number above 0"),
        ("optim.betas=[0.9, 1]", "optim.betas.1=1 is not below 1; use a number below 1"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] lacks entry 1 and it has no default; add it"),
        ("optim.betas=[0, 0, 0]", "optim.betas=[0, 0, 0] has 3 entries; write 2"),
        ("optim.schedule.final=2", "optim.schedule.final=2 is above 1; use 1 or less"),
        (
            "optim.max_grad_norm=.inf",
            "optim.max_grad_norm=.inf is not finite; write a finite number",
        ),
        (
            "seed=2147483648",
            "seed=2147483648 is not below 2147483648; use a number below 2147483648",
        ),
        ("model.rope.theta=1", "model.rope.theta=1 is not above 1; use a number above 1"),
        (
            "model.tie_embeddings=1",
            "model.tie_embeddings=1 is neither true nor false; write true or false",
        ),
        ("run_dir=5", "run_dir=5 is not text; put it in quotes"),
        (
            'run_dir="\\ud800"',
            'run_dir="\\uD800" has half of a surrogate pair; write whole characters',
        ),
        ('run_dir="a\\0b"', 'run_dir="a\\0b" holds a null character; leave it out'),
        (
            "run_dir=[&a [x], *a]",
            "run_dir=[&id001 [x], *id001] is not text; put it in quotes",
        ),
        (
            "model.num_layers=1001",
            "model.num_layers=1001 is above 1000; use 1000 or less",
        ),
        (
            "model.d_model=2147483648",
            "model.d_model=2147483648 is above 2147483647; use 2147483647 or less",
        ),
        ("run_dir=''", "run_dir='' is empty; write at least 1 character"),
        ("model.windows.pattern=4", "model.windows.pattern=4 is not a list; write [a, b, ...]"),
        (
            "data.sources=[{weight: 2}]",
            "data.sources.0={weight: 2} lacks path and it has no default; add data.sources.0.path",
        ),
        (
            "data.sources=[a]",
            "data.sources.0=a is not a section of keys; "
            "write a mapping of some of path, weight and label_mask",
        ),
        (
            "model.router.gating=softmx",
            "model.router.gating=softmx is not softmax, topk_softmax or sigmoid; "
            "use softmax, topk_softmax or sigmoid (the nearest is softmax)",
        ),
        ("parallel.dispatch=ragged", "parallel.dispatch=ragged is not gather; use gather"),
        (
            "model.embedding_scale=big",
            "model.embedding_scale=big is not a number and is not sqrt_d_model; "
            "write a number, or use sqrt_d_model",
        ),
    ],
)
def test_wrong_type_range_or_choice(override, expected):
    assert message(override) == expected


def test_a_rule_of_pydantic_without_a_text_of_its_own_is_quoted():
    with pytest.raises(ValidationError) as raised:
        Config.model_validate({"seed": 1, 5: 1})
    [text] = faults(raised.value)
    assert text.startswith("5=5 is refused (Keys should be strings); write a value")


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360])
def test_divisors_are_all_of_them_in_order(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_a_large_number_come_at_once():
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
