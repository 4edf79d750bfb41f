"""The messages between a rollout worker, the server of its environments, and these.

They go over stream sockets, as frames of a process's number and JSON. A frame for process 0 is for
the server itself, or from it; the others it hands on without looking into them.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.types import Json

SERVER: Final = 0
MOST_BYTES: Final = 16 << 20
"""Largest length of a message; anything longer is garbage."""

_HEAD: Final = struct.Struct("<III")
_MARK: Final = 0x48_46_45_4E
_READ_BYTES: Final = 1 << 18


class EnvironmentServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an environment server; ``fd`` is its end of the socket pair."""

    fd: int
    factory: str
    settings: dict[str, Json]
    seed: int
    path: tuple[str, ...]
    processes: ProcessConfig


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order to fork an environment process, with this number."""

    process: int


class KillProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order to kill a process."""

    process: int


class ServerLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is ready; ``missing`` is protection that there is not, each with the reason."""

    missing: dict[str, str]


class ServerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server ends, since there can be no environment processes, for this reason."""

    why: str


class ProcessEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process has ended, with a ``code`` as in ``Popen.returncode``.

    ``why`` is not empty if the server killed it by itself.
    """

    process: int
    code: int
    why: str = ""


class AskReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call number ``call``: the reply to an action."""

    call: int
    action: Action


class AskPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call number ``call``: the prompt of an ordinal."""

    call: int
    ordinal: int


class EnvironmentMade(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process has made its environment."""


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to an action."""

    call: int
    observation: Observation


class Prompted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt of an ordinal."""

    call: int
    prompt: str


class ToolFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The call raised `ToolError`; the process goes on."""

    call: int
    why: str


class Exhausted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process has no memory left, and ends."""


class Faulty(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment's code raised an error or returned something else than it must.

    ``call`` is None while the environment is made.
    """

    call: int | None
    why: str


Order = Fork | KillProcess
Report = ServerLoaded | ServerRefused | ProcessEnded
Question = AskReply | AskPrompt
Said = EnvironmentMade | Replied | Prompted | ToolFailed | Exhausted | Faulty

encode = msgspec.json.Encoder().encode
order: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
report: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
question: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
said: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


class FrameStream:
    """One end of a stream socket. Without ``waits``, no method waits for the other end."""

    def __init__(self, end: socket.socket, *, waits: bool = False) -> None:
        end.setblocking(waits)
        self.socket, self.fd = end, end.fileno()
        self._out, self._in = bytearray(), bytearray()

    @property
    def wants_to_write(self) -> bool:
        """True if there are bytes that the other end has not taken yet."""
        return bool(self._out)

    def send(self, process: int, message: bytes) -> None:
        """Send a frame, or as much of it as the other end takes now.

        A frame for an end that is gone is lost: `receive` tells that.
        """
        self._out += _HEAD.pack(_MARK, len(message), process)
        self._out += message
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the frames that are complete, of at least one read.

        Raises ``EOFError`` if the other end is gone, ``CorruptError`` for garbage.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other end is closed")
        self._in += data
        return self._whole()

    def _whole(self) -> list[tuple[int, bytes]]:
        found, at, view = [], 0, self._in
        while len(view) - at >= _HEAD.size:
            mark, length, process = _HEAD.unpack_from(view, at)
            if mark != _MARK or length > MOST_BYTES:
                raise CorruptError(f"bytes that are no message: {bytes(view[at : at + 16])!r}")
            stop = at + _HEAD.size + length
            if stop > len(view):
                break
            found.append((process, bytes(view[at + _HEAD.size : stop])))
            at = stop
        del self._in[:at]
        return found

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a stream socket, which no program inherits."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
