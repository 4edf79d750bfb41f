"""Large records are stored compressed, and come back as they were or are refused."""

from __future__ import annotations

import base64
import zlib

import pytest
from doubles import fakes

from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership import packed
from holdfast.elastic.membership.records import GenerationRecord
from holdfast.elastic.membership.view import decode, encode, generation_key

KEY = generation_key("run")


def record(nodes: int) -> GenerationRecord:
    each = [fakes.node(f"n{n}", fakes.worker(f"trainer/{n}")) for n in range(nodes)]
    return fakes.generation(1, each, ranks=[(node.node, node.workers[0]) for node in each])


@pytest.mark.parametrize("nodes", [3, 500])
def test_record_comes_back_as_it_was(nodes: int) -> None:
    text = encode(record(nodes))
    assert decode(KEY, text, GenerationRecord) == record(nodes)
    assert text.startswith("{") is (nodes == 3)


def test_large_record_has_less_than_a_third_of_its_size() -> None:
    plain = packed.unpack(encode(record(1000)))
    assert len(encode(record(1000))) < len(plain) / 3


@pytest.mark.parametrize(
    "damaged",
    [
        "zlib:",
        "zlib:not base64",
        "zlib:AAAA",
        "zlib:" + base64.b64encode(zlib.compress(b"{}")[:-3]).decode(),
        "zlib:" + base64.b64encode(zlib.compress(b"{}") + b"more").decode(),
        "zlib:" + base64.b64encode(zlib.compress(b"\xff" * 99)).decode(),
    ],
)
def test_damaged_text_is_refused_by_the_name_of_its_key(damaged: str) -> None:
    with pytest.raises(CoordinatorError, match="run/job/generation: not a readable record"):
        decode(KEY, damaged, GenerationRecord)


def test_text_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MOST_BYTES", 1000)
    bomb = "zlib:" + base64.b64encode(zlib.compress(bytes(100_000))).decode()
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        packed.unpack(bomb)
