"""Sessions of the Model Context Protocol: JSON-RPC with a process over pipes, or over HTTP.

Only what calls of tools need is here: the handshake, requests one after the other, and answers to
the server's own requests, which are all refused but a ping.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from holdfast.adapters.rl.environments.base import ToolError
from holdfast.adapters.rl.environments.remote.answers import check_status, http_client
from holdfast.ckpt.descriptors import readable
from holdfast.elastic.errors import ConfigError

_VERSION: Final = "2025-06-18"
_VERSIONS: Final = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"})
_CLIENT: Final = {"name": "holdfast", "version": "1"}
_NO_METHOD: Final = -32601
_MOST_BYTES: Final = 16 << 20
_READ_BYTES: Final = 1 << 16

Message = dict[str, Any]


class McpSession(ABC):
    """A session with a server, for one request at a time."""

    def __init__(self, source: str) -> None:
        self._source, self._numbers = source, itertools.count(1)

    @abstractmethod
    def _exchange(self, message: Message) -> Iterator[Message]:
        """Send a message and yield those that come; ends when there will be no more."""

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Send a message that has no answer."""

    @abstractmethod
    def close(self) -> None:
        """End the session; a process ends with it."""

    def begin(self) -> str:
        """Shake hands; return the version of the protocol. Raises `ToolError`."""
        asked = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": _CLIENT}
        version = str(self.request("initialize", asked).get("protocolVersion"))
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self._source} speaks version {version!r} of the Model Context Protocol, needed: "
                f"one of {', '.join(sorted(_VERSIONS))}"
            )
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return version

    def request(self, method: str, params: Message) -> Message:
        """Return the result of a request. Raises `ToolError`, also for an error that it answers."""
        number = next(self._numbers)
        sent = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        for message in self._exchange(sent):
            if "method" in message:
                self._decline(message)
            elif message.get("id") == number:
                return self._result(message, method)
        raise ToolError(f"{self._source} gave no answer to {method}")

    def _result(self, message: Message, method: str) -> Message:
        result = message.get("result")
        if isinstance(result, dict):
            return result
        error = message.get("error")
        raise ToolError(f"{self._source}: {method}: {error or 'neither a result nor an error'}")

    def _decline(self, message: Message) -> None:
        """Answer a request of the server; a notification needs none."""
        if "id" not in message:
            return
        answer: Message = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": _NO_METHOD, "message": "not supported"}
        self._send(answer)

    def _decoded(self, data: bytes | str) -> list[Message]:
        """Return the messages in a line or an event."""
        try:
            found = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ToolError(f"{self._source} sent garbage ({error}): {data[:100]!r}") from error
        messages = found if isinstance(found, list) else [found]
        if not all(isinstance(each, dict) for each in messages):
            raise ToolError(f"{self._source} sent garbage: {data[:100]!r}")
        return messages


class PipeSession(McpSession):
    """A session with a process of ``command``, by lines on its standard input and output.

    The process is in the group of this one, so it is killed with an environment process.
    """

    def __init__(self, command: Sequence[str], *, silence_s: float) -> None:
        super().__init__(f"the server {command[0]!r}")
        self._silence_s, self._said = silence_s, bytearray()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise ConfigError(f"environment 'mcp': command {list(command)}: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    def _exchange(self, message: Message) -> Iterator[Message]:
        self._send(message)
        until_s = time.monotonic() + self._silence_s
        while True:
            line, found, rest = self._said.partition(b"\n")
            if found:
                self._said = rest
                if line.strip():
                    yield from self._decoded(bytes(line))
                continue
            if not readable([self._from.fileno()], until_s - time.monotonic()):
                raise ToolError(f"{self._source} is silent for {self._silence_s:g} s")
            data = self._from.read(_READ_BYTES)
            if not data:
                return
            self._said += data
            if len(self._said) > _MOST_BYTES:
                raise ToolError(f"{self._source} sent a line of more than {_MOST_BYTES} bytes")

    def _send(self, message: Message) -> None:
        try:
            left = memoryview(msgspec.json.encode(message) + b"\n")
            while left:
                left = left[self._to.write(left) or 0 :]
        except OSError as error:
            raise ToolError(f"{self._source} has ended ({error})") from error

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()


class HttpSession(McpSession):
    """A session with the server at ``url``, by the protocol's streamable HTTP."""

    def __init__(self, url: str, *, silence_s: float, headers: dict[str, str]) -> None:
        super().__init__(url)
        self._url = url
        accepted = {"Accept": "application/json, text/event-stream"}
        self._http, self._client = http_client(silence_s=silence_s, headers=headers | accepted)
        try:
            self._client.headers["MCP-Protocol-Version"] = self.begin()
        except BaseException:
            self.close()
            raise

    def _exchange(self, message: Message) -> Iterator[Message]:
        try:
            with self._client.stream("POST", self._url, json=message) as answer:
                self._take_head(answer)
                if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    for event in self._http.EventSource(answer, _MOST_BYTES):
                        yield from self._decoded(event.data)
                elif body := answer.read():
                    yield from self._decoded(body)
        except self._http.HTTPError as error:
            raise ToolError(f"{self._url}: {type(error).__name__}: {error}") from error

    def _take_head(self, answer: Any) -> None:
        if answer.status_code == 404 and "Mcp-Session-Id" in self._client.headers:
            raise ToolError(f"{self._url} has forgotten the session")
        if answer.status_code >= 400:
            said = answer.read().decode(errors="replace")
            check_status(answer.status_code, said, source=self._url)
        if session := answer.headers.get("Mcp-Session-Id"):
            self._client.headers["Mcp-Session-Id"] = session

    def _send(self, message: Message) -> None:
        for _ in self._exchange(message):
            pass

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
