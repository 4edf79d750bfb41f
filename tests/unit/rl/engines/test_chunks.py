"""Events of completions: what is one is read, and the rest is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.adapters.rl.engines.chunks import CompletionChunk, parsed
from holdfast.ckpt.errors import CorruptError
from holdfast.elastic.errors import ConfigError


def event(**choice: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": "", **choice}], "unknown": 1})


LOGPROBS = {"token_logprobs": [-0.5, -1.5], "tokens": ["a", "b"]}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            event(token_ids=[3, 4], logprobs=LOGPROBS),
            CompletionChunk(tokens=(3, 4), logprobs=(-0.5, -1.5)),
        ),
        (event(token_ids=[], finish_reason="stop"), CompletionChunk(reason="stop")),
        (event(finish_reason="length"), CompletionChunk(reason="length")),
        (event(token_ids=[], weight_version="7"), CompletionChunk(version=7)),
        (
            json.dumps({"choices": [{"token_ids": []}], "weight_version": 3}),
            CompletionChunk(version=3),
        ),
        (json.dumps({"choices": [], "usage": {"prompt_tokens": 3}}), CompletionChunk()),
    ],
)
def test_an_event_gives_tokens_their_version_and_the_end(
    data: str, expected: CompletionChunk
) -> None:
    assert parsed(data, source="s") == expected


@pytest.mark.parametrize(
    "data",
    [
        "{",
        '{"choices": 3}',
        json.dumps({"error": {"message": "out of memory"}}),
        event(token_ids=[3], logprobs=LOGPROBS),
        event(token_ids=[3], logprobs={"token_logprobs": [None]}),
        event(token_ids=[3], logprobs={"token_logprobs": [0.5]}),
        event(token_ids=[3]),
    ],
)
def test_what_is_no_chunk_is_corrupt(data: str) -> None:
    with pytest.raises(CorruptError, match="s: "):
        parsed(data, source="s")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (event(text="hello", logprobs=LOGPROBS), "text without token ids: start a server"),
        (event(token_ids=[], weight_version="main"), "weight_version='main' is no number"),
    ],
)
def test_what_no_other_try_would_mend_is_refused(data: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(data, source="s")
