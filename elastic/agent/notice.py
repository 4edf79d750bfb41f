"""Notices that this node is about to be taken away: a signal, a file, or a URL of the cloud."""

from __future__ import annotations

import http
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

_TIMEOUT_S: Final = 1.0
_MAX_BODY: Final = 1 << 16
_NO: Final = (b"", b"false", b"none", b"no")
_EC2_PATH: Final = "/latest/meta-data/"
_EC2_TOKEN_PATH: Final = "/latest/api/token"
_EC2_TOKEN: Final = "X-aws-ec2-metadata-token"
_EC2_TOKEN_TTL_S: Final = 6 * 3600

LEFT_STATUS: Final = 75
"""Exit status of an agent that left after a notice (``EX_TEMPFAIL``): it is not restarted."""


class NoticeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of notices besides SIGTERM; they are checked every ``every_s`` seconds.

    ``file``: its existence is a notice; ``{node}`` in it stands for the node's name. ``url``: a GET
    with ``headers`` that succeeds with a body other than empty, ``FALSE`` or ``NONE`` is a notice;
    errors, such as the 404 of a machine that stays, are not. A URL below ``/latest/meta-data/``
    belongs to EC2's instance metadata, and is requested in a session (`MetadataSession`).
    ``grace_s`` is the time from a notice to the end of the node.
    """

    file: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    every_s: float = 1.0
    grace_s: float = 25.0

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"every_s is {self.every_s}, it must be positive")
        if self.grace_s <= 0:
            raise ValueError(f"grace_s is {self.grace_s}, it must be positive")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}, give one that starts with http:// or https://")


class NoticeWatch:
    """Checks for a notice on a thread of its own and calls ``notice(why)`` once on that thread."""

    def __init__(self, config: NoticeConfig, *, node: str, notice: Callable[[str], None]) -> None:
        self._config, self._notice = config, notice
        self._file = Path(config.file.replace("{node}", node)) if config.file else None
        self._session = MetadataSession.of(config.url, headers=config.headers)
        self._closed = threading.Event()
        if self._file or config.url:
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        while not (why := self._look()):
            if self._closed.wait(self._config.every_s):
                return
        if not self._closed.is_set():
            self._notice(why)

    def _look(self) -> str:
        if self._file is not None and self._file.exists():
            return f"the file {self._file} is there"
        if self._config.url and (answer := self._ask()):
            return f"{self._config.url} says {answer}"
        return ""

    def _ask(self) -> str:
        if self._session is not None:
            return self._session.ask()
        return ask(self._config.url, headers=self._config.headers)

    def close(self) -> None:
        """Stop checking; does not wait for a pending answer."""
        self._closed.set()


class MetadataSession:
    """Requests to EC2's instance metadata service with a session token (IMDSv2).

    The token is requested before the first request, and again if the service refuses it. A service
    that gives no token gets requests without one, as its first version expects.
    """

    def __init__(self, url: str, *, headers: dict[str, str]) -> None:
        self._url, self._headers = url, headers
        self._token = ""

    @classmethod
    def of(cls, url: str, *, headers: dict[str, str]) -> MetadataSession | None:
        """Return a session for a URL of the service, None for any other.

        Also returns None if ``headers`` have a token already.
        """
        ours = urllib.parse.urlsplit(url).path.startswith(_EC2_PATH)
        given = _EC2_TOKEN.lower() in map(str.lower, headers)
        return cls(url, headers=headers) if ours and not given else None

    def ask(self) -> str:
        """Return the notice at the URL, like `ask`."""
        from urllib.error import HTTPError

        fresh = not self._token
        if fresh:
            self._token = self._new_token()
        token = {_EC2_TOKEN: self._token} if self._token else {}
        try:
            return _notice(self._url, headers={**self._headers, **token})
        except HTTPError as error:
            error.close()
            if error.code != http.HTTPStatus.UNAUTHORIZED:
                return ""
            self._token = ""  # it is too old, or the service has restarted
        except (OSError, ValueError):
            return ""
        return "" if fresh else self.ask()

    def _new_token(self) -> str:
        url = urllib.parse.urljoin(self._url, _EC2_TOKEN_PATH)
        headers = {f"{_EC2_TOKEN}-ttl-seconds": str(_EC2_TOKEN_TTL_S)}
        try:
            return _body(url, headers=headers, method="PUT").decode("ascii")
        except (OSError, ValueError):
            return ""


def ask(url: str, *, headers: dict[str, str]) -> str:
    """Return the notice at ``url``, empty if there is none or ``url`` cannot be reached."""
    try:
        return _notice(url, headers=headers)
    except (OSError, ValueError):
        return ""


def _notice(url: str, *, headers: Mapping[str, str]) -> str:
    """Return the notice in the answer, empty if there is none."""
    body = _body(url, headers=headers, method="GET")
    return "" if body.lower() in _NO else str(body[:200].decode(errors="replace"))


def _body(url: str, *, headers: Mapping[str, str], method: str) -> bytes:
    from urllib.request import Request, urlopen  # with ssl, which few agents need: imported late

    request = Request(url, headers={**headers}, method=method)
    with urlopen(request, timeout=_TIMEOUT_S) as answer:
        return bytes(answer.read(_MAX_BODY).strip())
