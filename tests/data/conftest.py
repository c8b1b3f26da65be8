"""A small folder of tokens that `tokenize` wrote."""

from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_jax.data.tokenize import tokenize
from tests.data.folders import TEXTS


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents, tokenized with a trained vocabulary of 300."""
    root = tmp_path_factory.mktemp("text")
    for i, text in enumerate(TEXTS):
        (root / f"{i:02d}.txt").write_text(text)
    tokenize([root], root / "tokens", vocab_size=300)
    return root / "tokens"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write_file(name: str, content: bytes) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write_file
