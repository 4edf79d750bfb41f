"""The configuration of a sidecar process, for it and for the process that starts it."""

from __future__ import annotations

import msgspec

FAREWELL = b"."
"""The bytes that a parent writes into the lifeline to end its sidecar in order."""


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a sidecar process; end-of-file on the descriptor ``lifeline`` ends it.

    Sidecars with different ``memory_of`` share no memory, even on one host: for tests and
    benchmarks of transfers between hosts. The sidecar serves at ``port`` if that is free, at any
    other when not, or when 0. ``lease_fd`` is an inherited `LeasePage`: past the time in it,
    writers are refused; -1 where the node holds no lease.
    """

    run: str
    node: str
    key_file: str
    arena_dir: str
    host: str = "127.0.0.1"
    lifeline: int = 0
    parent_pid: int | None = None
    memory_of: str = ""
    port: int = 0
    lease_fd: int = -1
