"""The messages between an agent and its fork server: JSON, one per packet of a socket pair."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.elastic.preload.program import WorkerProgram

PACKET_BYTES: Final = 1 << 16
PID_BYTES: Final = 8
"""A forked worker writes its process id as so many bytes, in native order, and waits for `GO`."""

GO: Final = b"\1"
MOST_FDS: Final = 16


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a fork server; ``fd`` is its end of the socket pair."""

    modules: tuple[str, ...]
    program: WorkerProgram
    command: tuple[str, ...]
    fd: int


class ImportBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server begins to import a module."""

    module: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is ready; a worker's descriptors may have the numbers from ``first_fd`` on."""

    first_fd: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server ends, since workers cannot be forked after this import."""

    module: str
    reason: str


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to fork a worker, in a memory file: the first descriptor of its packet.

    The second is the socket of the worker's answer. If ``has_output``, the third is for both of its
    output streams. The rest get the numbers ``fds``. ``env`` is added to the environment; ``agent``
    is the process id of the agent.
    """

    env: dict[str, str]
    fds: tuple[int, ...]
    has_output: bool
    agent: int


FromServer = ImportBegun | Loaded | Refused
encode = msgspec.json.Encoder().encode
from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)
fork_order: msgspec.json.Decoder[ForkOrder] = msgspec.json.Decoder(ForkOrder)
