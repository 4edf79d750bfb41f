"""A check that ranks that save together have equal plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import msgspec

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.flatten import FlatState
from holdfast.ckpt.state.optimizers import HOW_NOT_WHAT

SHOWN = 100


def check_values(flat: FlatState, *, gather: Callable[[Any], list[Any]]) -> None:
    """Raise ``StateError``, on all ranks, where a plain value differs between ranks.

    Collective through ``gather``. A key may be missing at some ranks, and the parameters of an
    optimizer's group are merged over all ranks; neither counts as a difference.
    """
    digests = {key: _digest(flat.values[key]) for key in agreeing(flat)}
    if len(set(gather(_digest(sorted(digests.items()))))) == 1:
        return
    seen: dict[str, set[str]] = defaultdict(set)
    for theirs in gather(digests):
        for key, digest in theirs.items():
            seen[key].add(digest)
    unequal = sorted(key for key, found in seen.items() if len(found) > 1)
    if not unequal:
        return
    key = unequal[0]
    everyone = gather(_shown(flat.values[key]) if key in flat.values else None)
    owners: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(everyone):
        if text is not None:
            owners[text].append(rank)
    shown = "; ".join(f"rank {ranks[0]}: {text}" for text, ranks in list(owners.items())[:2])
    more = f" (and {len(unequal) - 1} more values)" if len(unequal) > 1 else ""
    raise StateError(
        f"{key}: the ranks have different values{more}: {shown}. A checkpoint keeps one value for "
        "all ranks: make them equal, or wrap a value that differs by rank in PerRank"
    )


def agreeing(flat: FlatState) -> Iterable[str]:
    """Yield the keys whose values must be equal at all ranks."""
    groups = tuple(f"{name}.groups." for name in flat.optimizers)
    for key in flat.values:
        if not (key.startswith(groups) and key.rpartition(".")[2] in HOW_NOT_WHAT):
            yield key


def _digest(value: Any) -> str:
    return sha256(_text(value)).hexdigest()[:16]


def _shown(value: Any) -> str:
    text = _text(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({_digest(value)})"


def _text(value: Any) -> bytes:
    return msgspec.json.encode(plain.unordered(value), order="deterministic")
