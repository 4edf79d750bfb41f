"""The messages between a fork server and its owner: JSON, one per packet of a socket pair."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.elastic.preload.program import WorkerProgram

PACKET_BYTES: Final = 1 << 16
PID_BYTES: Final = 8
"""A forked worker writes its process id as so many bytes, in native order, and waits for `GO`."""

GO: Final = b"\1"
MOST_FDS: Final = 16


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """The program that the workers of a fork server run, and its whole command line."""

    program: WorkerProgram
    command: tuple[str, ...]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a fork server; ``fd`` is its end of the socket pair."""

    modules: tuple[str, ...]
    task: WorkerTask
    fd: int


class ImportBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server begins to import a module."""

    module: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is ready; a worker's descriptors may have the numbers from ``first_fd`` on.

    ``pid`` is its process id; ``unbuffered`` says that its interpreter has the option ``-u``.
    """

    first_fd: int
    pid: int
    unbuffered: bool


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server ends, since workers cannot be forked after this import."""

    module: str
    reason: str


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order to fork a worker, in a memory file: the first descriptor of its packet.

    The second is the socket of the worker's answer. If ``has_output``, the third is for both of its
    output streams. The rest get the numbers ``fds``. ``env`` is added to the environment; ``owner``
    is the process id of the server's owner.
    """

    env: dict[str, str]
    fds: tuple[int, ...]
    has_output: bool
    owner: int


class BranchOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order to start a process that owns a fork server from its start, which imports nothing.

    The process runs ``argv`` in ``directory``, with the environment ``env``. Of the descriptors
    those from the third on are its three standard streams; the rest get the numbers ``fds``. The
    socket of its fork server gets the number ``socket``.

    The fork server forks workers for ``task``, with the environment ``server_env``, and is called
    ``name``. Its own output goes to the file ``output``; empty: where that of the process goes.
    """

    argv: tuple[str, ...]
    directory: str
    env: dict[str, str]
    fds: tuple[int, ...]
    socket: int
    owner: int
    task: WorkerTask
    name: str
    server_env: dict[str, str]
    output: str


FromServer = ImportBegun | Loaded | Refused
Order = ForkOrder | BranchOrder
encode = msgspec.json.Encoder().encode
from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)
order: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
