"""Conversion of text to tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Tokens = tuple[int, ...]
"""Ids of a vocabulary."""


class Tokenizer(Protocol):
    """A vocabulary of ``size`` ids, of which ``end`` ends an answer."""

    size: int
    end: int

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, without an end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; for tokens that have none, a text that is no answer."""


class Ascii:
    """A vocabulary in which a token is a character's code, and the newline ends an answer."""

    size = 128
    end = 10

    def encode(self, text: str) -> Tokens:
        """Return the codes; a question mark for a character outside ASCII."""
        return tuple(text.encode("ascii", "replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters."""
        return "".join(map(chr, tokens))
