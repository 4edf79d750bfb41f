"""A server with OpenAI's completions as a sampling engine, over HTTP.

The prompt goes as token ids, and the answer comes back as events with token ids and
log-probabilities. A server that is killed ends its stream without an error of HTTP, so an answer is
over only with a ``finish_reason``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from torch import Tensor

from holdfast.adapters.rl.engines.chunks import CompletionChunk, parsed
from holdfast.adapters.rl.engines.protocol import SampledToken, TokenPlace, room
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.ckpt import checks
from holdfast.ckpt.errors import CorruptError, PeerError
from holdfast.elastic.errors import ConfigError

_CONNECT_S: Final = 5.0
_DONE: Final = "[DONE]"
_MOST_DELTA_BYTES: Final = 4 << 20

Load = Callable[[Mapping[str, Tensor], int], object]
"""Makes a server sample with the weights of a version; returns when it does."""

_RULES: Final[Mapping[str, checks.Rule]] = {
    "limits": checks.instance(TurnLimits, remedy="give TurnLimits"),
    "capacity": checks.count(1, remedy="give 1 or more answers"),
}


@dataclass(kw_only=True)
class CompletionServer:
    """The server at ``url``, which samples answers of ``limits`` at ``temperature``.

    Its weights never change and are those of ``version``; or ``load_with`` gives it others, a
    function of weights and a version, and then its events must tell their ``weight_version``: a
    server that was restarted would go on with older ones unnoticed. A silence of ``silence_s``
    counts as a hang. With ``by_place`` a request has the place of its first token,
    ``holdfast_place``: [seed, ordinal, sample, position], for servers that draw noise by it; others
    get a ``seed`` that follows from it.
    """

    url: str
    limits: TurnLimits
    model: str = ""
    capacity: int = 8
    version: int | None = None
    load_with: Load | None = None
    temperature: float = 1.0
    silence_s: float = 60.0
    by_place: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    pause_path: str = "/pause"
    resume_path: str = "/resume"
    answer_path: ClassVar[str] = "/v1/completions"

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"CompletionServer(url={self.url!r}): give http://host:port")
        checks.check_fields(self, _RULES, error=ConfigError)
        if self.limits.turns:
            raise ConfigError("CompletionServer: limits with turns, and a server gives one turn")
        if (self.version is None) == (self.load_with is None):
            raise ConfigError(
                "CompletionServer: give version=, that of weights which never change, or "
                "load_with=, by which it gets others"
            )
        http = _http()
        self.url = self.url.rstrip("/")
        self._client = http.Client(
            headers=dict(self.headers),
            timeout=http.Timeout(self.silence_s, connect=_CONNECT_S),
            limits=http.Limits(max_connections=None),
            trust_env=False,
        )

    def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
        """Yield the tokens that follow ``ids`` (see `SamplingEngine`)."""
        for tokens in self.generate_runs(ids, place):
            yield from tokens

    def generate_runs(
        self, ids: Sequence[int], place: TokenPlace
    ) -> Generator[Sequence[SampledToken]]:
        """Yield the same tokens in runs, each those of an event."""
        most = room(self.limits, prompt=place.prompt, ids=ids)
        if not most:
            return
        count, last, reason = 0, None, ""
        for chunk in self._chunks(self._body(ids, place, most)):
            left = 0 if last == self.limits.end else most - count
            if found := _cut(chunk, left=left, end=self.limits.end):
                version = self._version_of(chunk)
                yield [SampledToken(*each, version) for each in found]
                count, last = count + len(found), found[-1][0]
            if len(found) < len(chunk.tokens):
                raise CorruptError(f"{self.url}: tokens after the end of an answer")
            reason = chunk.reason or reason
        self._check_end(reason, count=count, most=most, last=last)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have the server sample with these weights, by ``load_with``.

        Raises ``ConfigError`` without it, ``PeerError`` if the server cannot be reached.
        """
        if self.load_with is None:
            raise ConfigError(
                f"{self.url}: load(version={version}), and its weights never change: give "
                "CompletionServer(load_with=...), a function of weights and a version"
            )
        with self._failing():
            self.load_with(weights, version)

    def pause(self) -> None:
        """Sample no token until `resume`, if the server can."""
        self._post(self.pause_path)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._post(self.resume_path)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _body(self, ids: Sequence[int], place: TokenPlace, most: int) -> dict[str, Any]:
        position = [place.seed, place.ordinal, place.sample, len(ids)]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": most,
            "temperature": self.temperature,
            "top_p": 1.0,
            "stream": True,
            "logprobs": 1,
            "return_token_ids": True,
            "seed": zlib.crc32(repr(position).encode()) >> 1,
        }
        return body | ({"holdfast_place": position} if self.by_place else {})

    def _chunks(self, body: dict[str, Any]) -> Iterator[CompletionChunk]:
        """Yield the chunks of an answer; they may end before it does."""
        with self._failing():
            request = self._client.sse(
                self.url + self.answer_path,
                method="POST",
                json=body,
                max_event_size=_MOST_DELTA_BYTES,
            )
            with request as events:
                self._check_status(events.response)
                for event in events:
                    if event.data == _DONE:
                        return
                    yield parsed(event.data, source=self.url)

    def _post(self, path: str) -> None:
        with self._failing():
            self._check_status(self._client.post(self.url + path))

    def _check_status(self, answer: Any) -> None:
        if answer.status_code < 400:
            return
        said = answer.read().decode(errors="replace")[:300]
        found = f"{self.url}: status {answer.status_code}: {said}"
        if answer.status_code < 500 and answer.status_code not in (408, 429):
            raise ConfigError(f"{found}; the same request would be refused again: change it")
        raise PeerError(found)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise ``PeerError`` for a server that is not there, breaks off, or hangs."""
        http = _http()
        try:
            yield
        except http.SSEError as error:
            raise CorruptError(f"{self.url}: no stream of events ({error})") from error
        except http.HTTPError as error:
            kind = "silent" if isinstance(error, http.TimeoutException) else "lost"
            raise PeerError(f"{self.url} is {kind}: {error or type(error).__name__}") from error

    def _version_of(self, chunk: CompletionChunk) -> int:
        told = self.version if chunk.version is None else chunk.version
        if told is None:
            raise ConfigError(
                f"{self.url}: its weights change, and its events do not tell their weight_version: "
                "let the server tell it, or give version= and weights that never change"
            )
        return told

    def _check_end(self, reason: str, *, count: int, most: int, last: int | None) -> None:
        if reason not in ("stop", "length"):
            told = f"finish_reason {reason!r}" if reason else "no finish_reason, so it was lost"
            raise PeerError(f"{self.url}: the stream ended after {count} tokens with {told}")
        if last != self.limits.end and count < most:
            raise ConfigError(
                f"{self.url}: an answer ended ({reason}) after {count} of {most} tokens, and not "
                f"with the end token {self.limits.end}: let the server stop at that one alone, "
                "return it, and have room for prompt and answer"
            )


def _cut(chunk: CompletionChunk, *, left: int, end: int) -> list[tuple[int, float]]:
    """Return the tokens of a chunk with their log-probabilities, up to the end of the answer."""
    stop = chunk.tokens.index(end) + 1 if end in chunk.tokens else len(chunk.tokens)
    return [*zip(chunk.tokens, chunk.logprobs, strict=True)][: min(stop, left)]


def _http() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            f"CompletionServer needs httpx2 ({error}): pip install 'holdfast[engines]'"
        ) from error
    return httpx2
