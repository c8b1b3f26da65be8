"""Hugging Face models in and out: the folder, its config, its tensors. Today Olmo3MoeForCausalLM.

What only trains a model (router losses, jitter, initialisation) is not part of the exchange.
"""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from olmo_jax.arch.parameters import parameters
from olmo_jax.config.messages import listing, some
from olmo_jax.config.records import ModelConfig
from olmo_jax.errors import UserError
from olmo_jax.interop import files
from olmo_jax.interop.expressible import check_expressible
from olmo_jax.interop.olmo3moe_config import config_fields, model_config
from olmo_jax.interop.weights import combine, separate, tensor_shapes

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_READABLE = ("float32", "bfloat16", "float16")


def _match(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse names or shapes other than the wanted ones."""
    if lacking := [name for name in wanted if name not in given]:
        raise UserError(
            f"missing: {some(lacking, 3)}; the config asks for {len(wanted)} arrays and "
            f"{len(lacking)} of them are not there; bring them, or the config they belong to"
        )
    if extra := [name for name in given if name not in wanted]:
        raise UserError(
            f"too much: {some(extra, 3)}; the config asks for {len(wanted)} arrays and not for "
            f"{'this one' if len(extra) == 1 else 'these'}; remove it, or bring its config"
        )
    for name, shape in wanted.items():
        if given[name] != shape:
            raise UserError(
                f"{name} has shape {list(given[name])}, but the config asks for {list(shape)}; "
                "bring the array or the config that belongs to the other"
            )


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _without_tied_head(
    config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Drop a copy of the embedding that some writers store as the head of a tied model."""
    given = dict(tensors)
    if not config.tie_embeddings or _HEAD not in given:
        return given
    head = given.pop(_HEAD)
    if _EMBEDDING in given and not np.array_equal(head, given[_EMBEDDING]):
        raise UserError(
            f"{_HEAD} is not {_EMBEDDING}, but tie_word_embeddings=true makes them one; "
            f"set tie_word_embeddings=false, or remove {_HEAD}"
        )
    return given


def from_huggingface(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Return the FP32 parameters that `tensors` hold: exact, whatever float they come in.

    Raises: UserError that names a tensor which is missing, too much, or of a wrong shape or dtype.
    """
    given = _without_tied_head(config, tensors)
    _match(_shapes(given), tensor_shapes(config))
    for name, tensor in given.items():
        if tensor.dtype.name not in _READABLE:
            raise UserError(
                f"{name} is {tensor.dtype.name}, and float32 does not hold that as it is meant; "
                f"bring it as {listing(_READABLE)}"
            )
    leaves = combine(config, given)
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}


def to_huggingface(
    config: ModelConfig, params: Mapping[str, Array | np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors of Olmo3MoeForCausalLM, each in the dtype of its leaf.

    Linear: gradients map to the class's gradients. The arrays are contiguous, as safetensors'
    writer needs without checking.
    Raises: UserError if the class cannot compute this model, or the leaves are not its leaves.
    """
    check_expressible(config)
    leaves = {name: np.asarray(leaf) for name, leaf in params.items()}
    _match(_shapes(leaves), {k: leaf.shape for k, leaf in parameters(config).items()})
    return {k: np.ascontiguousarray(v) for k, v in separate(config, leaves).items()}


def load(path: str | Path) -> tuple[ModelConfig, dict[str, Array]]:
    """Return the config and FP32 parameters in the folder `path` of an Olmo3MoeForCausalLM.

    Raises: UserError for a field or tensor that has no counterpart here, and for broken files.
    """
    folder = Path(path)
    fields = files.read_config(folder)
    try:
        config = model_config(fields)
        return config, from_huggingface(config, files.read_tensors(folder))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def save(path: str | Path, config: ModelConfig, params: Mapping[str, Array | np.ndarray]) -> None:
    """Write config.json and model.safetensors of Olmo3MoeForCausalLM into the folder `path`.

    Raises: UserError, before anything is written, as `to_huggingface` does.
    """
    tensors = to_huggingface(config, params)
    files.write(Path(path), config_fields(config), tensors)
