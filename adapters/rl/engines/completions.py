"""A server with OpenAI's completions as a sampling engine, over HTTP.

The prompt goes as token ids, and the answer comes back as events with token ids and
log-probabilities. A server that is killed ends its stream without an error of HTTP, so an answer is
over only with a ``finish_reason``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from holdfast.adapters.rl.engines.chunks import Chunk, parsed
from holdfast.adapters.rl.engines.protocol import Place, SampledToken, room
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.ckpt.errors import CorruptError, PeerError
from holdfast.elastic.errors import ConfigError

_CONNECT_S: Final = 5.0
_DONE: Final = "[DONE]"
_MOST_DELTA_BYTES: Final = 4 << 20

Load = Callable[[Mapping[str, Tensor], int], object]
"""Makes a server sample with the weights of a version; returns when it does."""


class CompletionServer:
    """The server at ``url``, which samples answers at ``temperature`` up to the ``limits``.

    ``load`` gives it weights; without it the server keeps those it has, which are those of
    ``version``. A server that says ``weight_version`` in its events is believed; of another one,
    answers in progress end when weights are loaded, to go on under the new ones. A silence of
    ``silence_s`` counts as a hang. With ``by_place`` the request has the place of its first token,
    ``holdfast_place``: [seed, ordinal, sample, position], for servers that draw noise by it; others
    get a ``seed`` that follows from it.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: TurnLimits,
        model: str = "",
        capacity: int = 8,
        version: int | None = None,
        load: Load | None = None,
        temperature: float = 1.0,
        silence_s: float = 60.0,
        by_place: bool = False,
        headers: Mapping[str, str] | None = None,
        pause_path: str = "/pause",
        resume_path: str = "/resume",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"CompletionServer({url!r}): give a URL, http://host:port")
        if capacity < 1:
            raise ConfigError(f"CompletionServer(capacity={capacity}): give 1 or more answers")
        if limits.turns:
            raise ConfigError("CompletionServer: limits with turns, and a server gives one turn")
        http = _http()
        self.url, self.capacity = url.rstrip("/"), capacity
        self._limits, self._model, self._temperature = limits, model, temperature
        self._load, self._by_place = load, by_place
        self._paths = (pause_path, resume_path)
        self._lock = threading.Lock()
        self._version, self._loads = version, 0
        bounds = http.Limits(max_connections=None)
        timeout = http.Timeout(silence_s, connect=_CONNECT_S)
        self._client = http.Client(
            headers=dict(headers or {}), timeout=timeout, limits=bounds, trust_env=False
        )

    def generate(self, ids: Sequence[int], place: Place) -> Generator[SampledToken]:
        """Yield the tokens that follow ``ids`` (see `SamplingEngine`)."""
        most = room(self._limits, prompt=place.prompt, ids=ids)
        if not most:
            return
        with self._lock:
            version, loads = self._version, self._loads
        count, last, reason = 0, -1, ""
        for chunk in self._chunks(self._body(ids, place, most)):
            told = chunk.version if chunk.version is not None else version
            if told is None:
                raise ConfigError(
                    f"{self.url} does not say the version of its weights: give version= if they "
                    "never change, or load="
                )
            for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
                if chunk.version is None and loads != self._loads:
                    raise PeerError(f"{self.url}: weights were loaded in the middle of an answer")
                count, last = count + 1, token
                if count > most:
                    raise CorruptError(f"{self.url}: more than the {most} tokens asked for")
                yield SampledToken(token, logprob, told)
            reason = chunk.reason or reason
        self._check_end(reason, count=count, most=most, last=last)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have the server sample with these weights, by the function that was given.

        Raises ``ConfigError`` without one.
        """
        if self._load is None:
            raise ConfigError(
                f"{self.url}: load(version={version}), and nothing says how: give "
                "CompletionServer(load=...), a function of weights and a version"
            )
        with self._lock:
            self._loads += 1  # a token that comes later may be of either version
            self._load(weights, version)
            self._version = version

    def pause(self) -> None:
        """Sample no token until `resume`, if the server can."""
        self._post(self._paths[0])

    def resume(self) -> None:
        """Go on after `pause`."""
        self._post(self._paths[1])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _body(self, ids: Sequence[int], place: Place, most: int) -> dict[str, Any]:
        position = [place.seed, place.ordinal, place.sample, len(ids)]
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": most,
            "temperature": self._temperature,
            "top_p": 1.0,
            "stream": True,
            "logprobs": 1,
            "return_token_ids": True,
            "seed": zlib.crc32(repr(position).encode()) >> 1,
        }
        return body | ({"holdfast_place": position} if self._by_place else {})

    def _chunks(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """Yield the chunks of an answer; they may end before it does."""
        with self._failing():
            request = self._client.sse(
                f"{self.url}/v1/completions",
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

    def _check_end(self, reason: str, *, count: int, most: int, last: int) -> None:
        if reason not in ("stop", "length"):
            told = f"finish_reason {reason!r}" if reason else "no finish_reason, so it was lost"
            raise PeerError(f"{self.url}: the stream ended after {count} tokens with {told}")
        if last != self._limits.end and count < most:
            raise ConfigError(
                f"{self.url}: an answer ended ({reason}) after {count} of {most} tokens, and not "
                f"with the end token {self._limits.end}: let the server stop at that one alone, "
                "return it, and have room for prompt and answer"
            )


def _http() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            f"CompletionServer needs httpx2 ({error}): pip install 'holdfast[engines]'"
        ) from error
    return httpx2
