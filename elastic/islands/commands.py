"""The commands of rank 0, which all ranks of an island carry out together. Pure values."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.islands.messages import Asked
from holdfast.elastic.sea.dealing import Blocks
from holdfast.elastic.sea.records import Merged


class AwaitNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is nothing to do yet: ask again."""


class AdoptMerge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Adopt the merge of a tide; ``own`` is the place of the own work, -1 if it is not in it."""

    tide: int
    portion: int
    weights: tuple[int, ...]
    whole: int
    own: int


class GiveWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Save the sea's weights below ``root`` for an island that asks."""

    request: Asked
    root: str


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the sea's weights after ``tide`` merges, ``bases`` of each portion, from ``root``."""

    root: str
    tide: int
    bases: tuple[int, ...]


class GoOn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on with the training; ``lineage`` is that of an island that has just joined.

    ``place`` is the island's place in the logbook after the merges that it has adopted, ``stride``
    the steps from its last tide to the next. ``dealt`` are the blocks of samples that it has got.
    """

    lineage: int = -1
    place: str = ""
    stride: int = 0
    dealt: Blocks = ()


class EnterAnew(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Enter the sea anew, without own work: others have its samples, or the state is too old.

    ``keeps``: the sea's weights in the state are right, so the merges after them can be adopted.
    """

    keeps: bool = False


class KeepModules(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Save the run's modules below ``root``: the sea is over."""

    root: str


class LeaderFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 cannot go on."""

    message: str


def adoption(record: Merged, *, own: str = "") -> AdoptMerge:
    """Return the adoption of a merge; ``own`` is the digest of the work that is the island's."""
    digests = [part.digest for part in record.parts]
    return AdoptMerge(
        tide=record.tide,
        portion=record.portion,
        weights=tuple(part.weight for part in record.parts),
        whole=record.whole,
        own=digests.index(own) if own else -1,
    )


Command: TypeAlias = (
    AwaitNews
    | AdoptMerge
    | GiveWeights
    | LoadWeights
    | GoOn
    | EnterAnew
    | KeepModules
    | LeaderFailed
)

learn(globals())
