"""Answers of remote environments: read, and judged; patience where no call would be made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from holdfast.adapters.rl.environments.base import Action, Observation, ToolError
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

_PAUSE_S: Final = 0.5

_T = TypeVar("_T")


class PromptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A service's answer to a request for a prompt."""

    prompt: str


class ReplyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A service's answer to an action; the fields are those of `Observation`."""

    text: str = ""
    state: Json = None
    reward: float | None = None
    speaker: str = ""
    rewards: dict[str, float] = {}

    def observation(self) -> Observation:
        """Return it as an observation. Raises ``ArgumentError``."""
        return Observation(**msgspec.structs.asdict(self))


_FIELDS: Final = frozenset(ReplyAnswer.__struct_fields__)


def prompt_of(answer: object, *, source: str) -> str:
    """Return the prompt in an answer. Raises `ToolError` if there is none."""
    return _converted(answer, PromptAnswer, source).prompt


def observation_of(answer: object, *, source: str) -> Observation:
    """Return the observation in an answer. Raises `ToolError` if there is none."""
    if isinstance(answer, dict) and not answer.keys() & _FIELDS:
        raise ToolError(f"{source} answered without text, state or reward")
    return _converted(answer, ReplyAnswer, source).observation()


def request_of(action: Action, *, seed: int) -> dict[str, Json]:
    """Return the fields of a request for the reply to an action."""
    found: dict[str, Json] = msgspec.to_builtins(action)
    if not action.speaker:
        del found["speaker"]  # a job of one policy
    return found | {"seed": seed}


def patiently(ask: Callable[[], str], *, patience_s: float) -> str:
    """Return what ``ask`` returns; repeat it after a `ToolError`, for ``patience_s`` seconds."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except ToolError:
            if time.monotonic() + _PAUSE_S > until_s:
                raise
        time.sleep(_PAUSE_S)


def http_client(*, silence_s: float, headers: dict[str, str]) -> Any:
    """Return (module, client) for requests that fail after a silence. Raises ``ConfigError``."""
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            f"an environment behind HTTP needs httpx2 ({error}): pip install 'holdfast[engines]'"
        ) from error
    client = httpx2.Client(
        headers=headers,
        timeout=httpx2.Timeout(silence_s),
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
    )
    return httpx2, client


def check_status(status: int, said: str, *, source: str) -> None:
    """Raise `ToolError` for a status that may be better the next time, else ``ConfigError``."""
    if status < 400:
        return
    found = f"{source}: status {status}: {said[:300]}"
    if status < 500 and status not in (408, 429):
        raise ConfigError(f"{found}; the same request would be refused again: change it")
    raise ToolError(found)


def check_url(url: str, *, source: str) -> str:
    """Return an address without a last slash. Raises ``ConfigError`` for what is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{source}: url is {url!r}, needed: http://host:port")
    return url.rstrip("/")


def _converted(answer: object, kind: type[_T], source: str) -> _T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ToolError(f"{source} answered garbage ({error})") from error
