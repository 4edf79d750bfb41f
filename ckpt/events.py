"""Events: the base that all kinds share, and the kinds that tell of checkpoints. Pure.

`holdfast.elastic.events` lists all kinds and states the contract; these lie here because a sidecar
writes them.
"""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 2
"""The version of the format in which events are written."""

ENVELOPE: Final = ("v", "time_s", "node", "source", "seat")
"""The fields that every event has, beside its ``kind``."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=""):
    """Something that happened, as one line of JSON tells it; ``kind`` is the struct's tag.

    The code where it happens fills in the fields of the kind; the writer fills in these.
    """

    v: int = VERSION
    """Version of the format in which the line is written."""

    time_s: float = 0.0
    """Wall clock time of the event, in seconds since 1970 (UTC)."""

    node: str = ""
    """Name of the node that wrote the event, or ``launcher`` or ``chaos``."""

    source: str = ""
    """Part that tells it: ``worker``, ``agent``, ``launcher``, ``launched`` or ``chaos``."""

    seat: str = ""
    """Seat of the worker that tells it or that it is about (``trainer/0``); empty without one."""

    @classmethod
    def tag(cls) -> str:
        """Return the name of the kind, as files and settings have it."""
        return str(cls.__struct_config__.tag)

    @property
    def kind(self) -> str:
        """The name of the event's kind."""
        return self.tag()


class CheckpointStarted(Event, frozen=True, kw_only=True, tag="checkpoint_started"):
    """The nodes begin to write a checkpoint."""

    step: int
    """Step that the checkpoint holds."""

    bytes: int
    """Size of the checkpoint before compression."""


class CheckpointProgress(Event, frozen=True, kw_only=True, tag="checkpoint_progress"):
    """A part of a checkpoint is written; told every few seconds."""

    step: int
    """Step that the checkpoint holds."""

    bytes: int
    """Bytes that all nodes have written so far."""

    total_bytes: int
    """Bytes that there are to write."""


class CheckpointDone(Event, frozen=True, kw_only=True, tag="checkpoint_done"):
    """A checkpoint is durable: its manifest is published."""

    step: int
    """Step that the checkpoint holds."""

    seconds: float
    """Seconds from the start of the writing to the publication."""

    bytes: int
    """Size of the checkpoint before compression."""

    bytes_per_s: int
    """Rate of the writing, in bytes per second."""


class CheckpointRetried(Event, frozen=True, kw_only=True, tag="checkpoint_retried"):
    """The store refused a write, which is tried again."""

    step: int
    """Step that the checkpoint holds."""

    attempt: int
    """Number of the attempt that begins now; the first retry is 1."""

    error: str
    """Message of the store's error."""


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag="checkpoint_skipped"):
    """A checkpoint was due and is left out."""

    step: int
    """Step whose checkpoint is left out."""

    reason: str
    """Reason, in words."""


class CheckpointCarried(Event, frozen=True, kw_only=True, tag="checkpoint_carried"):
    """A new generation goes on with a checkpoint that the one before had begun."""

    step: int
    """Step that the checkpoint holds."""

    rebuilt: tuple[int, ...]
    """Ranks whose part is rebuilt, since the node that held it is gone."""


class CheckpointFailed(Event, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A checkpoint could not be written, and is given up."""

    step: int
    """Step whose checkpoint is given up."""

    error: str
    """Message of the error, which names store and remedy."""

    in_a_row: int
    """Number of checkpoints that have failed one after the other."""

    fatal: bool
    """True if the job ends because of it."""

    newest: int
    """Newest step that is durable, -1 for none."""


CheckpointNews = (
    CheckpointStarted
    | CheckpointProgress
    | CheckpointDone
    | CheckpointRetried
    | CheckpointSkipped
    | CheckpointCarried
    | CheckpointFailed
)
"""The events that a sidecar tells of checkpoints."""
