"""The tensors of islands that met in pairs, for a replay: those that are known, and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.ckpt import api
from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.islands.island import KEY
from holdfast.elastic.sea.records import Entered, Founded, Part, Record
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.replayed_sea import ReplayedSea


def known_islands(
    founded: Founded, records: Sequence[Record], root: str | Path | None, *, step: int | None
) -> dict[str, tuple[ReplayedSea, int]]:
    """Return the islands whose weights a checkpoint has, and the tide after which.

    With one of an island it is that one; with the first weights of the sea, those that began with
    them. None has no weights. Raises ``MismatchError`` for another checkpoint.
    """
    if root is None:
        return {}
    with api.open(root, step=step) as opened:
        counters = opened.values.get(f"{KEY}.counters")
    names = (
        [each.island for each in records if isinstance(each, Entered) and each.tide == 0]
        if counters is None
        else [str(counters["island"])]
    )
    found = {}
    for name in dict.fromkeys(names):
        sea = ReplayedSea(founded)
        sea.load(root, step=step)
        found[name] = sea, 0 if counters is None else int(counters["adopted"])
    return found


def ends_as_replayed(
    view: View, sea: ReplayedSea, payload: Callable[[Part], bytes], root: str
) -> bool | None:
    """Return whether the weights that the last island left are those of the last merge.

    None if the sea is not over, or something of it is gone. It takes the payloads alone.
    """
    if not view.is_over:
        return None
    last = [view.former[island].last for island in sorted(view.ended)]
    try:
        sea.merge_last(list(zip(*last, strict=True)), payload)
    except NotFoundError:
        return None
    return sea.equals(root)
