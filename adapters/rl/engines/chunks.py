"""An event of a stream of completions: the tokens that were added, as far as it is well-formed."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.elastic.errors import ConfigError

_ROUNDING: Final = 1e-3
"""A logarithm of 1 that was computed in low precision; NaN is no smaller either."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_version: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    weight_version: int | str | None = None
    error: Any = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens with their log-probabilities; ``version`` and ``reason`` if the event has them."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: int | None = None
    reason: str = ""


def parsed(data: str, *, source: str) -> CompletionChunk:
    """Return the chunk of an event's JSON text.

    Raises ``CorruptError`` if it is none, and ``ConfigError`` if the server gives no token ids.
    """
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise CorruptError(f"{source}: an event that is no chunk of an answer ({error})") from error
    if event.error is not None:
        raise CorruptError(f"{source}: an error in the stream: {str(event.error)[:300]}")
    if not event.choices:
        return CompletionChunk()  # usage, or a sign of life
    choice = event.choices[0]
    if choice.token_ids is None and (choice.text or choice.logprobs):
        raise ConfigError(
            f"{source} gives text without token ids: start a server that knows return_token_ids, "
            "as vLLM does"
        )
    tokens = tuple(choice.token_ids or ())
    given = choice.logprobs.token_logprobs if choice.logprobs else []
    logprobs = tuple(math.nan if each is None else each for each in given)
    if len(logprobs) != len(tokens) or not all(each <= _ROUNDING for each in logprobs):
        raise CorruptError(f"{source}: {len(tokens)} tokens with log-probabilities {given}")
    return CompletionChunk(
        tokens=tokens,
        logprobs=logprobs,
        version=_number(event.weight_version, choice.weight_version, source=source),
        reason=choice.finish_reason or "",
    )


def _number(*told: int | str | None, source: str) -> int | None:
    found = next((each for each in told if each is not None), None)
    try:
        return None if found is None else int(found)
    except ValueError as error:
        raise ConfigError(
            f"{source}: weight_version={found!r} is no number of a policy version: let load= give "
            "the server the version"
        ) from error
