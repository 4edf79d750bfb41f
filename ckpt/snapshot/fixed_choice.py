"""The choice of the pieces of a state that are fixed: they do not change from step to step. Pure.

A piece is chosen once it has stayed the same for some snapshots in a row, or at once if it is
*frozen* (a parameter without a gradient). One that is written anew at every step is not the same,
though its bytes may be: it would be copied again at once, and a larger or smaller fixed part needs
other slots, all of which are made anew. A piece that changes after it was chosen has to
stay the same for twice as long before it is chosen again. So an average of weights that is brought
up to date every few steps is soon left among the moving pieces.

A larger fixed part is written anew as a whole. So small pieces join a large part only once it would
have spared as many bytes as that costs: what has rested for long will rest for long.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

LEAST_BYTES: Final = 1 << 20
"""Fewer bytes than that are copied every time: a fixed part would not pay."""

_PATIENCE: Final = 4
_MOST_PATIENCE: Final = 1 << 12
_WORTH: Final = 8
"""A larger fixed part is made when it spares one in so many of the bytes that are copied."""

Piece = TypeVar("Piece")


@dataclass(slots=True)
class _PieceHistory:
    """A piece's contents, the snapshots in which they were the same, and those that it takes."""

    contents: Hashable
    same: int = 0
    patience: int = _PATIENCE
    moved: bool = False


class FixedChoice(Generic[Piece]):
    """Observes the pieces of one rank's state; ``least_bytes`` are worth a fixed part."""

    def __init__(self, *, least_bytes: int = LEAST_BYTES) -> None:
        self._least_bytes = least_bytes
        self._seen: dict[Piece, _PieceHistory] = {}

    def observe(self, pieces: Mapping[Piece, Hashable]) -> None:
        """Note a snapshot's pieces, with what tells contents apart; all others are forgotten."""
        seen, self._seen = self._seen, {}
        for piece, contents in pieces.items():
            known = self._seen[piece] = seen.get(piece) or _PieceHistory(contents, same=-1)
            known.same = known.same + 1 if known.contents == contents else 0
            known.contents = contents

    def moved(self, pieces: Collection[Piece]) -> None:
        """Note that chosen pieces have changed."""
        for piece in pieces:
            seen = self._seen.setdefault(piece, _PieceHistory(None))
            seen.same, seen.moved = 0, True
            seen.patience = min(2 * seen.patience, _MOST_PATIENCE)

    def choose(
        self,
        sizes: Mapping[Piece, int],
        *,
        now: Collection[Piece],
        frozen: Collection[Piece] = (),
    ) -> frozenset[Piece]:
        """Return the pieces to keep fixed, of those with ``sizes`` in bytes.

        It is ``now`` unless enough other pieces have become fixed, or too few of these are left.
        """
        kept = frozenset(now) & sizes.keys()
        ripe = kept | {piece for piece in sizes if self._is_ripe(piece, piece in frozen)}
        gained = sum(sizes[piece] for piece in ripe - kept)
        moving = sum(nbytes for piece, nbytes in sizes.items() if piece not in kept)
        written = sum(sizes[piece] for piece in ripe)
        spared = sum(sizes[piece] * self._rest(piece, piece in frozen) for piece in ripe - kept)
        if gained >= max(self._least_bytes, moving // _WORTH) and spared >= written:
            return ripe
        return kept if sum(sizes[piece] for piece in kept) >= self._least_bytes else frozenset()

    def _rest(self, piece: Piece, frozen: bool) -> int:
        """Return for how many snapshots a piece is expected to stay the same."""
        seen = self._seen.get(piece)
        known = 0 if seen is None else seen.same
        return _MOST_PATIENCE if frozen and (seen is None or not seen.moved) else known

    def _is_ripe(self, piece: Piece, frozen: bool) -> bool:
        seen = self._seen.get(piece)
        if seen is None:
            return frozen
        return seen.same >= seen.patience or (frozen and not seen.moved)
