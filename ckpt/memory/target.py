"""The destination and settings of checkpoints, which a trainer sends to its sidecar."""

from __future__ import annotations

import msgspec

from holdfast.ckpt.types import learn


class CheckpointTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The ``root`` of checkpoints, and how they are written there.

    ``compression`` maps glob patterns of names to codecs (see ``holdfast.ckpt.format.codecs``).
    ``incremental`` checkpoints refer to the one before for tensors that did not change. A node
    writes at most ``bytes_per_s`` (0: as fast as the store takes them). A failed write is tried
    ``retries`` times more. After more than ``failures_allowed`` checkpoints in a row have failed,
    the job ends (None: never). When the job is stopped, its newest protected step is saved if that
    takes no longer than ``grace_s``.
    """

    root: str
    compression: dict[str, str] = {}
    incremental: bool = False
    bytes_per_s: int = 0
    retries: int = 0
    failures_allowed: int | None = None
    grace_s: float = 0.0


class DiskTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The directory on every node's own disk to which protected snapshots are spilled.

    A snapshot is spilled every ``every`` steps, and when the job is stopped, if that takes no
    longer than ``grace_s``.
    """

    directory: str
    every: int
    grace_s: float = 0.0


learn(globals())
