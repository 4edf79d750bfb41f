"""The model's weights: integers that say which work is in them, and how often.

A step of an island makes a quantity of work for each portion. The sea's weights of a portion are
the sums by island; an island's own work is a quantity by step. A payload holds own work without its
last binary digit: that is the rounding, which stays with the island.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, TypeAlias

PAYLOAD_BYTES: Final = 8192
"""The size of every payload."""

Units: TypeAlias = dict[int, int]
"""Quantities of work by the step that made them."""


def quantity(name: str, step: int, portion: int, *, attempt: int = 0) -> int:
    """Return the work of an island's step: the same whenever it is executed in one attempt."""
    text = f"{name} {step} {portion} {attempt}".encode()
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "little")


def sent(own: Units) -> Units:
    """Return the part of own work that a payload holds."""
    return {step: q - q % 2 for step, q in own.items() if q - q % 2}


def packed(units: Units, *, island: str, lineage: int, trained: int = 0) -> bytes:
    """Return a payload; ``trained`` samples of those dealt to the lineage are in it."""
    body = json.dumps([island, lineage, sorted(units.items()), trained]).encode()
    assert len(body) <= PAYLOAD_BYTES
    return body.ljust(PAYLOAD_BYTES)


def unpacked(payload: bytes) -> tuple[str, int, Units, int]:
    """Return a payload's island, its lineage, its work, and the number of samples in it."""
    island, lineage, units, trained = json.loads(payload)
    return island, lineage, dict(units), trained


def without(own: Units, merged: Units) -> Units:
    """Return own work without the part that is merged."""
    both = {step: own.get(step, 0) - merged.get(step, 0) for step in {*own, *merged}}
    return {step: q for step, q in both.items() if q}


def digest(value: Any) -> str:
    """Return the digest of weights, or of anything else."""
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()
