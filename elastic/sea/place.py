"""A place in a sea's logbook: all that its reader knows there, so nothing is read again. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea.dealing import Supply
from holdfast.elastic.sea.member import SeaMember
from holdfast.elastic.sea.records import Digest, Founded, Number, Why
from holdfast.elastic.sea.view import View

_DIGEST_BYTES: Final = 16

START: Final = "0" * 2 * _DIGEST_BYTES
"""The digest of a chain without records."""


class LogbookPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place after ``length`` records, ``tide`` of them merges.

    ``before`` is the digest of the chain without its last record, ``digest`` that with it. ``left``
    is the reason of the reader's last leave. The rest is that of the `View`.
    """

    length: Number
    tide: Number
    before: Digest
    digest: Digest
    left: Why | None
    members: dict[str, SeaMember]
    former: dict[str, SeaMember]
    states: tuple[dict[int, Digest], ...]
    supply: Supply | None = None
    pairings: dict[int, dict[str, str]] = {}

    def view(self, founded: Founded) -> View:
        """Return the view here; ``founded`` is the first record."""
        return View(
            founded=founded,
            length=self.length,
            tide=self.tide,
            members=self.members,
            former=self.former,
            states=self.states,
            supply=self.supply,
            pairings=self.pairings,
        )


def place_of(view: View, *, before: str, digest: str, left: Why | None) -> LogbookPlace:
    """Return the place of a view; the digests are those of `LogbookPlace`."""
    return LogbookPlace(
        length=view.length,
        tide=view.tide,
        before=before,
        digest=digest,
        left=left,
        members=dict(view.members),
        former=dict(view.former),
        states=tuple(dict(each) for each in view.states),
        supply=view.supply,
        pairings={tide: dict(each) for tide, each in view.pairings.items()},
    )


def chained(digest: str, record: bytes) -> str:
    """Return the digest of a chain with one record more."""
    return hashlib.blake2b(digest.encode() + record, digest_size=_DIGEST_BYTES).hexdigest()


def encode(place: LogbookPlace) -> str:
    """Return a place as JSON."""
    return msgspec.json.encode(place).decode()


def decode(text: str) -> LogbookPlace:
    """Parse a place. Raises ``SeaError``."""
    try:
        return msgspec.json.decode(text, type=LogbookPlace)
    except msgspec.MsgspecError as error:
        raise SeaError(
            f"the island's place in the logbook is no text of this version of Holdfast: {error}; "
            "begin with the checkpoint of another step, or with another checkpoint directory"
        ) from error


learn(globals())
