"""What a loaded tokenizer loses of the text: unknown tokens, characters that do not come back."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from olmo_jax.errors import UserError

LARGEST_LOSS = 0.01
"""Of tokens that are unknown, and of characters that do not come back."""

DECODED_WHOLE, DECODED_ONE_IN = 64, 16  # pieces: all of small data, then every 16th
SPACE_MARK = "\u2581"  # SentencePiece's, which a normalizer puts in the place of a space


class Fidelity:
    """Counts of what comes back, over all that is encoded.

    Unknown tokens are counted everywhere, characters where a piece is decoded. Spaces do not count,
    nor does what the tokenizer's own normalizer changes: it is asked for lower case, or for NFKC.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.unknown_id = unknown_id(tokenizer)
        self.num_tokens = self.num_unknown = self.num_pieces = 0
        self.num_chars = self.num_lost = 0
        self.lost: Counter[str] = Counter()

    def add(self, pieces: Sequence[str], encodings: Sequence[Encoding]) -> None:
        """Count a batch of pieces and what they were encoded to."""
        for piece, encoding in zip(pieces, encodings, strict=True):
            known = [i for i in encoding.ids if i != self.unknown_id]
            self.num_tokens += len(encoding.ids)
            self.num_unknown += len(encoding.ids) - len(known)
            if self.num_pieces < DECODED_WHOLE or self.num_pieces % DECODED_ONE_IN == 0:
                self._compare(piece, self.tokenizer.decode(known, skip_special_tokens=False))
            self.num_pieces += 1

    def _compare(self, text: str, decoded: str) -> None:
        """Count characters without their order, which no encoder changes."""
        normalizer = self.tokenizer.normalizer
        wanted = letters(normalizer.normalize_str(text) if normalizer else text)
        lost = wanted - letters(decoded)
        self.num_chars += wanted.total()
        self.num_lost += lost.total()
        self.lost += lost

    def summary(self) -> str | None:
        """Say what does not come back; nothing if all of it does."""
        if not self.num_unknown and not self.num_lost:
            return None
        often = ", ".join(repr(letter) for letter, _ in self.lost.most_common(5))
        return (
            f"{self.num_unknown:,} of {self.num_tokens:,} tokens are unknown, and "
            f"{self.num_lost:,} of {self.num_chars:,} characters that were decoded again do not "
            "come back" + (f" (most often {often})" if often else "")
        )

    def check(self, path: Path) -> None:
        """Refuse a tokenizer that loses more than a hundredth.

        Raises: UserError.
        """
        unknown = self.num_unknown > LARGEST_LOSS * self.num_tokens
        if unknown or self.num_lost > LARGEST_LOSS * self.num_chars:
            raise UserError(
                f"--tokenizer {path} does not hold this text: {self.summary()}; at most "
                f"{LARGEST_LOSS:.0%} may be lost; name a tokenizer that was trained on such text, "
                "or leave --tokenizer out to train one"
            )


def letters(text: str) -> Counter[str]:
    """Count the characters of a text other than spaces."""
    return Counter(letter for letter in text if letter != SPACE_MARK and not letter.isspace())


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that stands for what the vocabulary lacks, if there is one."""
    model = json.loads(tokenizer.to_str())["model"]
    if (number := model.get("unk_id")) is not None:
        return number
    name = model.get("unk_token")
    return None if name is None else tokenizer.token_to_id(name)
