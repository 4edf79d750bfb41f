"""The guard of the dashboard: who may read, under which name, and what a page may load.

A page keeps its token in the address behind ``#``, which browsers send to no server, and sends it
in a header. No cookie is set, as cookies are shared by all servers of a machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.elastic.errors import ConfigError

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_LEAST_CHARACTERS: Final = 22
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

OPEN: Final = ("/", "/page.css", "/page.js", "/parts.js", "/charts.js", "/dom.js", "/icon.svg")
"""The paths that need no token: they hold nothing of a run."""


class Guard:
    """Refuses requests under a foreign name (DNS rebinding), and those without the token."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str]) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {*_LOOPBACK, *(each.lower() for each in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if not self._is_ours(headers.get("host", "")):
            return PlainTextResponse(
                "this name is not the dashboard's: open it under the address that `holdfast "
                "dashboard` printed, or name yours with --host",
                status_code=421,
            )
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads", status_code=405)
        if scope["path"] in OPEN:
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if hmac.compare_digest(given, self._token):
            return None
        return PlainTextResponse("the token is missing or wrong", status_code=401)

    def _is_ours(self, host: str) -> bool:
        """Say whether a Host header names this server; an address needs no look-up of a name."""
        name = host.lower()
        if not name.endswith("]"):
            name, colon, port = name.rpartition(":") if ":" in name else (name, "", "")
            if colon and not port.isdecimal():
                return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return "*" in self._hosts


def token_of(path: Path | None) -> str:
    """Return a random token, or the one in a file, which is made if it is not there.

    Raises ``ConfigError`` for a file that others can read or whose token is too short.
    """
    if path is None:
        return secrets.token_urlsafe(24)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    except FileExistsError:
        pass
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others can read this token: chmod 600 {path}")
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{path}: it does not hold a token of {_LEAST_CHARACTERS} characters or more: remove "
            "it, and the command makes one"
        )
    return token
