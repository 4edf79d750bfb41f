"""The model's weights: integers that say which work is in them, and how often.

A step of an island makes a quantity of work for each portion. The sea's weights of a portion are
the sums by island; an island's own work is a quantity by step. A payload holds own work without its
last binary digit: that is the rounding, which stays with the island.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

PAYLOAD_BYTES: Final = 8192
"""The size of every payload."""

FAULT: Final = -1
"""In place of the step, for what a fault has put into own work."""

MIDDLE: Final = "the middle"
"""The entry of weights that says with which weights they met."""

Units: TypeAlias = dict[int, int]
"""Quantities of work by the step that made them."""


def quantity(name: str, step: int, portion: int, *, attempt: int = 0) -> int:
    """Return the work of an island's step: the same whenever it is executed in one attempt."""
    text = f"{name} {step} {portion} {attempt}".encode()
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "little")


def sent(own: Units) -> Units:
    """Return the part of own work that a payload holds."""
    return {step: q - q % 2 for step, q in own.items() if q - q % 2}


def packed(
    units: Units, *, island: str, lineage: int, trained: int = 0, weights: str = ""
) -> bytes:
    """Return a payload; ``trained`` samples of those dealt to the lineage are in it.

    ``weights`` is the digest of the island's own, where it has some.
    """
    body = json.dumps([island, lineage, sorted(units.items()), trained, weights]).encode()
    assert len(body) <= PAYLOAD_BYTES
    return body.ljust(PAYLOAD_BYTES)


def unpacked(payload: bytes) -> tuple[str, int, Units, int]:
    """Return a payload's island, its lineage, its work, and the number of samples in it."""
    island, lineage, units, trained, _ = json.loads(payload)
    return island, lineage, dict(units), trained


def added(sums: dict[str, int], payloads: Iterable[bytes]) -> dict[str, int]:
    """Return weights with the work of payloads."""
    found = dict(sums)
    for one in payloads:
        island, _, units, _ = unpacked(one)
        found[island] = found.get(island, 0) + sum(units.values())
    return found


def met(sums: dict[str, int], payloads: Sequence[bytes]) -> dict[str, int]:
    """Return an island's weights after a meeting: work is added, the middle is a digest."""
    found = added(sums, payloads)
    found[MIDDLE] = int(digest([found.get(MIDDLE, 0), _contents(payloads)]), 16)
    return found


def last(payloads: Iterable[bytes]) -> dict[str, int]:
    """Return the weights of the last merge."""
    return {MIDDLE: int(digest(_contents(payloads)), 16)}


def _contents(payloads: Iterable[bytes]) -> list[Any]:
    """Return the contents of payloads in order, without lineages, which depend on time."""
    return sorted([island, *rest] for island, _, *rest in map(json.loads, payloads))


def without(own: Units, merged: Units) -> Units:
    """Return own work without the part that is merged."""
    both = {step: own.get(step, 0) - merged.get(step, 0) for step in {*own, *merged}}
    return {step: q for step, q in both.items() if q}


def digest(value: Any) -> str:
    """Return the digest of weights, or of anything else."""
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()
