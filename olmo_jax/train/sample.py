"""Continue a prompt with a run's weights: the whole text again for every token, no cache."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from olmo_jax.checkpoint import model_of, read_saved, refuse_edited, restore_weights
from olmo_jax.config.records import ModelConfig
from olmo_jax.data.tokenize import find_eos, read_tokenizer_file
from olmo_jax.errors import UserError
from olmo_jax.model import apply
from olmo_jax.model.transformer import Params, initialise
from olmo_jax.train import run_folder

LENGTH_UNIT = 64

NextLogits = Callable[[np.ndarray, int], np.ndarray]
"""From padded tokens and a position to the logits of the token after it."""


def sample(run_dir: Path, text: str, *, num_tokens: int, temperature: float, seed: int) -> str:
    """Return `text` and how the run's model goes on; it ends early at the end of a document.

    Temperature 0 takes the likeliest token. What is longer than a training sequence is truncated on
    the left.

    Raises: UserError if the run has no weights or no tokenizer, or if its config.yaml or
        tokenizer.json is not that of its weights.
    """
    run_folder.load_config(run_dir)  # which refuses what is no run
    saved = read_saved(run_dir)
    refuse_edited(saved)
    tokenizer = read_tokenizer(run_dir)
    refuse_undecodable(text)
    prompt = tokenizer.encode(text, add_special_tokens=False).ids or [find_eos(tokenizer)]
    limit = saved.config["train"]["sequence_length"]
    length = min(limit, -(-(len(prompt) + num_tokens) // LENGTH_UNIT) * LENGTH_UNIT)
    model = model_of(saved)
    params = restored(run_dir, model, saved.position.step)

    @jax.jit
    def compiled(weights: Params, tokens: jax.Array, position: jax.Array) -> jax.Array:
        return apply(model, weights, tokens[None])[0, position]

    def next_logits(tokens: np.ndarray, position: int) -> np.ndarray:
        logits = compiled(params, jnp.asarray(tokens), jnp.asarray(position))
        return np.asarray(logits)[: tokenizer.get_vocab_size()]

    choose = partial(pick, temperature=temperature, generator=np.random.default_rng(seed))
    ids = extend(prompt, num_tokens, length, find_eos(tokenizer), next_logits, choose)
    return tokenizer.decode(ids)


def restored(run_dir: Path, model: ModelConfig, step: int | None = None) -> dict[str, jax.Array]:
    """Return a run's weights on one device: after a step, or those of its last checkpoint."""
    params, expert_bias = jax.eval_shape(lambda: initialise(model, 0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=device)
        for name, leaf in {**params, **expert_bias}.items()
    }
    return restore_weights(run_dir, shapes, step)


def refuse_undecodable(text: str) -> None:
    """Refuse a prompt whose bytes were no UTF-8.

    Raises: UserError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt has bytes that are not UTF-8 from character {error.start} on; a prompt is "
            "UTF-8 text; write it as such"
        ) from None


def read_tokenizer(run_dir: Path) -> Tokenizer:
    """Return the tokenizer that the run's data was made with.

    Raises: UserError if the data had none.
    """
    path = run_dir / run_folder.TOKENIZER
    if not path.is_file():
        raise UserError(
            f"{run_dir} has no {run_folder.TOKENIZER}, for its data had none; copy the "
            "tokenizer of that data there"
        )
    return read_tokenizer_file(path)


def extend(
    prompt: list[int],
    num_tokens: int,
    length: int,
    eos_id: int,
    next_logits: NextLogits,
    choose: Callable[[np.ndarray], int],
) -> list[int]:
    """Return `prompt` and up to `num_tokens` more; the model sees the last `length` at most."""
    ids = list(prompt)
    for _ in range(num_tokens):
        seen = ids[-length:]
        # Always `length` tokens, so that one program serves all: what stands behind the position
        # that is read is not seen from there.
        tokens = np.full(length, eos_id, np.int32)
        tokens[: len(seen)] = seen
        chosen = choose(next_logits(tokens, len(seen) - 1))
        if chosen == eos_id:
            break
        ids.append(chosen)
    return ids


def pick(logits: np.ndarray, *, temperature: float, generator: np.random.Generator) -> int:
    """Return a token drawn from softmax(logits / temperature), the likeliest one at 0."""
    if temperature == 0:
        return int(np.argmax(logits))
    # Below the largest, so that a small temperature sends all others to -inf and not itself to inf.
    scores = logits.astype(np.float64) - np.max(logits)
    with np.errstate(over="ignore"):
        scores /= temperature
    # The largest of scores with Gumbel noise is a draw from their softmax.
    return int(np.argmax(scores + generator.gumbel(size=logits.shape)))
