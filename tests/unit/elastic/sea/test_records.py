"""Records of the logbook and works: the same bytes for equal values, strictly read."""

from __future__ import annotations

import msgspec
import pytest
from doubles import seas

from holdfast.ckpt.errors import CorruptError
from holdfast.elastic.sea.records import (
    Entered,
    Founded,
    Left,
    Parameter,
    Record,
    agreed,
    decode_record,
    decode_work,
    difference,
    encode,
)
from holdfast.elastic.sea.settings import Islands, Nesterov, Quorum

ISLANDS = Islands(name="a", meet="sea")
VIEW = seas.entered(seas.founded(ISLANDS), "a", "b")
FOUNDED = VIEW.founded
WORKS = [seas.work(VIEW, name) for name in ("a", "b")]


@pytest.mark.parametrize(
    "record",
    [
        FOUNDED,
        Entered(number=1, island="oslo.2", tide=3, weight=4, lineage=1),
        Left(number=2, island="a", why="silent"),
        Left(number=2, island="a", why="astray", portion=1, seen=(WORKS[0].part,)),
        seas.merged(VIEW, *WORKS),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    data = encode(record)
    assert decode_record(data, origin="logbook/00000001.json") == record
    assert encode(decode_record(data, origin="x")) == data


def test_a_work_is_read_as_it_was_written() -> None:
    assert decode_work(encode(WORKS[0]), origin="works/a") == WORKS[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"\xff", ""),
        (b'{"kind":"sunk","number":1}', "sunk"),
        (b'{"kind":"left","number":1,"island":"a","why":"done","more":1}', "more"),
        (b'{"kind":"left","number":1,"island":"../a","why":"done"}', "island"),
        (b'{"kind":"left","number":-1,"island":"a","why":"done"}', "number"),
        (b'{"kind":"left","number":1,"island":"a","why":"bored"}', "why"),
        (b'{"kind":"entered","number":1,"island":"a","tide":0,"weight":0,"lineage":1}', "weight"),
        (b'{"kind":"left","number":1,"island":"a","why":"done"} x', "trailing"),
        (b"[" * 100_000, ""),
    ],
)
def test_anything_else_is_refused_with_its_place_and_field(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=rf"(?s)logbook/00000007\.json.*{message}"):
        decode_record(data, origin="logbook/00000007.json")


def test_an_island_whose_settings_differ_is_told_the_first_difference() -> None:
    assert isinstance(FOUNDED, Founded)
    same = FOUNDED.parameters
    other = (Parameter(name="weight", shape=(3, 2)), same[1])
    for islands, parameters, expected in (
        (ISLANDS, same, ""),
        (Islands(name="b", overlap=3, patience_s=5, founders=3), same, ""),
        (Islands(every=80), same, "every is 80 here and 40 in the sea"),
        (Islands(outer=Nesterov(lr=0.5)), same, "lr is 0.5 here and 0.7"),
        (Islands(wait=Quorum(0.5)), same, "share is 0.5 here and None"),
        (ISLANDS, same[:1], "1 parameters here and 2 in the sea"),
        (ISLANDS, other, r"parameter 'weight' of shape [3, 2] here and 'weight' of shape [2, 3]"),
    ):
        found = difference(FOUNDED, islands, parameters)
        assert found.startswith(expected) if expected else found == ""


def test_settings_survive_the_record() -> None:
    quorum = agreed(Islands(wait=Quorum(0.8, grace_s=5)))
    assert (quorum.share, quorum.grace_s) == (0.8, 5.0)
    assert msgspec.json.decode(msgspec.json.encode(quorum), type=type(quorum)) == quorum
