"""Where and how snapshots become checkpoints: what a trainer tells its sidecar. Pure."""

from __future__ import annotations

import msgspec

from ckpt.types import learn


class CheckpointTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The ``root`` of checkpoints, and how they are written there.

    ``compression`` maps glob patterns of names to codecs (see ``ckpt.codecs``). ``incremental``
    checkpoints refer to the one before for tensors that did not change.
    """

    root: str
    compression: dict[str, str] = {}
    incremental: bool = False


learn(globals())
