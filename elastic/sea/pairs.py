"""Pairs of islands by a keyed permutation: who meets whom at a tide. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_DIGEST_BYTES = 16


def pairs_of(islands: Iterable[str], *, key: str, tide: int) -> dict[str, str]:
    """Return each island's partner at a tide; one that is missing meets nobody.

    The order of ``islands`` does not matter. Every pair is as likely as every other, and follows
    from ``key``, the tide and the names alone.
    """
    order = sorted(set(islands), key=lambda name: _place(name, key, tide))
    pairs = zip(order[::2], order[1::2], strict=False)
    return {one: other for a, b in pairs for one, other in ((a, b), (b, a))}


def _place(name: str, key: str, tide: int) -> tuple[str, str]:
    text = f"{key} {tide} {name}".encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest(), name
