"""Continuing a text, with logits that are made up."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from olmo_jax.errors import UserError
from olmo_jax.train.sample import extend, pick, read_tokenizer, refuse_undecodable

EOS = 0
VOCAB = 10


def counting(tokens: np.ndarray, position: int) -> np.ndarray:
    """A model that says one more than the last token it sees, and EOS after 9."""
    return np.eye(VOCAB)[(tokens[position] + 1) % VOCAB]


LIKELIEST = partial(pick, temperature=0.0, generator=np.random.default_rng(0))


def test_the_text_goes_on_after_the_prompt() -> None:
    assert extend([2, 3], 4, 16, EOS, counting, LIKELIEST) == [2, 3, 4, 5, 6, 7]


def test_it_ends_at_the_end_of_a_document() -> None:
    assert extend([7], 50, 16, EOS, counting, LIKELIEST) == [7, 8, 9]


def test_a_text_longer_than_the_model_sees_is_cut_on_the_left() -> None:
    seen: list[tuple[list[int], int]] = []

    def model(tokens: np.ndarray, position: int) -> np.ndarray:
        seen.append((tokens.tolist(), position))
        return counting(tokens, position)

    assert extend([1, 2, 3], 3, 4, EOS, model, LIKELIEST) == [1, 2, 3, 4, 5, 6]
    # One shape throughout, so that the model compiles once.
    assert seen == [([1, 2, 3, EOS], 2), ([1, 2, 3, 4], 3), ([2, 3, 4, 5], 3)]


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    probabilities = np.array([0.6, 0.3, 0.1])
    generator = np.random.default_rng(0)
    logits = 2 * np.log(probabilities)
    drawn = [pick(logits, temperature=2.0, generator=generator) for _ in range(20_000)]
    # Four standard deviations of a share of 20,000 draws.
    np.testing.assert_allclose(np.bincount(drawn) / 20_000, probabilities, atol=0.014)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_small_temperature_takes_the_likeliest_token(temperature: float, dtype: type) -> None:
    generator = np.random.default_rng(0)
    for logits in ([3.0, 1.0, 3.5, -2.0], [-9.0, -8.0, -7.0, -30.0], [0.0, 0.0, 1e-6, 0.0]):
        drawn = {
            pick(np.array(logits, dtype), temperature=temperature, generator=generator)
            for _ in range(50)
        }
        assert drawn == {2}


def test_a_large_temperature_takes_every_token_alike() -> None:
    generator = np.random.default_rng(0)
    logits = np.array([3.0, -50.0, 20.0, 0.0], np.float32)
    drawn = [pick(logits, temperature=1e300, generator=generator) for _ in range(4000)]
    # Four standard deviations of a share of 4,000 draws.
    np.testing.assert_allclose(np.bincount(drawn) / 4000, np.full(4, 0.25), atol=0.028)


def test_a_seed_repeats_its_text() -> None:
    def draw(seed: int) -> list[int]:
        generator = np.random.default_rng(seed)
        return [pick(np.zeros(50), temperature=1.0, generator=generator) for _ in range(8)]

    assert draw(1) == draw(1) != draw(2)


def test_a_run_without_a_tokenizer_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_a_prompt_that_is_no_utf8_is_a_users_error() -> None:
    with pytest.raises(UserError, match="not UTF-8 from character 1 on"):
        refuse_undecodable("a\udcff")
