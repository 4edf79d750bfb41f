"""Events of islands: works that are sent, merges that are adopted, who joins and leaves. Pure."""

from __future__ import annotations

from holdfast.ckpt.events import Event


class IslandJoined(Event, frozen=True, kw_only=True, tag="island_joined"):
    """This run takes part in the sea."""

    island: str
    """Name of the island."""

    tide: int
    """Number of merges that it has adopted."""

    lineage: int
    """Number of the record with which it took on the weights that its own work continues."""

    how: str
    """Source of its weights: ``built`` like those of the others, ``given`` by another island, or
    ``kept`` from before it was put out."""

    seconds: float = 0.0
    """Seconds that it took."""


class IslandLeft(Event, frozen=True, kw_only=True, tag="island_left"):
    """This run takes part in the sea no more."""

    island: str
    """Name of the island."""

    why: str
    """Cause: ``done``, ``silent``, ``astray`` or ``lost``."""


class TidePublished(Event, frozen=True, kw_only=True, tag="tide_published"):
    """A work of this island is there for the others."""

    tide: int
    """Number of merges that the island had adopted."""

    portion: int
    """Portion of the weights."""

    weight: int
    """Weight of the work, in samples."""

    bytes: int
    """Bytes of its payload."""

    sent_bytes: int
    """Bytes of all payloads that this generation has sent."""

    seconds: float = 0.0
    """Seconds that the payload took to the store."""


class TideAdopted(Event, frozen=True, kw_only=True, tag="tide_adopted"):
    """The weights have moved by a merge."""

    tide: int
    """Number of the merge."""

    portion: int
    """Portion of the weights."""

    step: int
    """Number of complete steps."""

    islands: int
    """Number of works in the merge."""

    whole: int
    """Weight of all islands together, in samples."""

    named: bool
    """True if a work of this island is in it."""

    state: str
    """Digest of the sea's weights and momentum of the portion."""

    waited_s: float
    """Seconds for which training waited for it."""

    fetched_bytes: int
    """Bytes of all payloads that this generation has fetched."""

    bytes: int = 0
    """Bytes of the payloads of this merge that were fetched."""

    seconds: float = 0.0
    """Seconds that these took, one after another."""

    direct_bytes: int = 0
    """Bytes of these that other islands gave, without the store."""


class WeightsGiven(Event, frozen=True, kw_only=True, tag="weights_given"):
    """This island has given the sea's weights to one that asked for them."""

    island: str
    """Name of the island that asked."""

    tide: int
    """Number of merges in the weights."""

    seconds: float
    """Seconds that it took."""
