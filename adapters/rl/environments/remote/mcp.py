"""An environment behind the Model Context Protocol: a server with two tools.

The tool ``prompt`` takes an ordinal and the seed, and returns ``{"prompt": "..."}``. The tool
``respond`` takes the fields of an `Action` and the seed, and returns those of an `Observation`,
both as structured content or as JSON text. The server is a command, which is started, or an
address. One session has one call at a time.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import msgspec

from holdfast.adapters.rl.environments.base import Action, Observation, ToolError
from holdfast.adapters.rl.environments.remote.answers import (
    check_url,
    observation_of,
    patiently,
    prompt_of,
    request_of,
)
from holdfast.adapters.rl.environments.remote.sessions import HttpSession, McpSession, PipeSession
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

_PATIENCE_S: Final = 30.0


class McpEnvironment:
    """The environment of the server that ``command`` starts, or of the one at ``url``.

    A call that fails or is silent for ``silence_s`` seconds costs an attempt and its session; the
    next call has a new one, and a new process of the command.
    """

    def __init__(
        self,
        *,
        seed: int,
        command: list[str] | None = None,
        url: str | None = None,
        silence_s: float = 60.0,
        headers: dict[str, str] | None = None,
        prompt_tool: str = "prompt",
        respond_tool: str = "respond",
    ) -> None:
        if (command is None) == (url is None):
            raise ConfigError("environment 'mcp': give command, which starts a server, or url")
        self._seed, self._command, self._silence_s = seed, command, silence_s
        self._url = None if url is None else check_url(url, source="environment 'mcp'")
        self._headers = headers or {}
        self._prompt_tool, self._respond_tool = prompt_tool, respond_tool
        self._free: list[McpSession] = []
        self._lock = threading.Lock()

    def prompt(self, ordinal: int) -> str:
        """Return the prompt that the tool has."""

        def ask() -> str:
            found = self._call(self._prompt_tool, {"ordinal": ordinal, "seed": self._seed})
            return prompt_of(found, source=self._prompt_tool)

        return patiently(ask, patience_s=_PATIENCE_S)

    def respond(self, action: Action) -> Observation:
        """Return the reply that the tool has."""
        found = self._call(self._respond_tool, request_of(action, seed=self._seed))
        return observation_of(found, source=self._respond_tool)

    def _call(self, tool: str, arguments: dict[str, Json]) -> object:
        session = self._session()
        try:
            found = session.request("tools/call", {"name": tool, "arguments": arguments})
        except BaseException:
            session.close()
            raise
        with self._lock:
            self._free.append(session)
        return _content(found, tool)

    def _session(self) -> McpSession:
        with self._lock:
            if self._free:
                return self._free.pop()
        if self._command is not None:
            return PipeSession(self._command, silence_s=self._silence_s)
        assert self._url is not None, "a command or an address"
        return HttpSession(self._url, silence_s=self._silence_s, headers=self._headers)


def _content(result: dict[str, Any], tool: str) -> object:
    """Return the content of a tool's result. Raises `ToolError` if it is an error, or none."""
    parts = result.get("content") or []
    texts = [str(each.get("text", "")) for each in parts if isinstance(each, dict)]
    text = "".join(texts)
    if result.get("isError"):
        raise ToolError(f"{tool}: {text or 'the tool reports an error'}")
    if (structured := result.get("structuredContent")) is not None:
        return structured
    try:
        found: object = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ToolError(f"{tool} answered garbage ({error}): {text[:200]}") from error
    return found
