"""Reading any sealed manifest or index gives the true content or a clear refusal."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import hostile
import msgspec
from checkpoint_states import copied
from doubles.memory_store import MemoryStore
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.checkpoints.catalog import load_manifest
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError
from holdfast.ckpt.format.columns import read_indexes
from holdfast.ckpt.format.manifest import (
    MANIFEST,
    PackIndex,
    WriterRecord,
    read_index,
    read_manifest,
    read_note,
)
from holdfast.ckpt.store.base import Store

Json = Any

ODD_NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 7, 63, 64, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64, 10**18, 10**30]
)
ODD_WORDS = st.sampled_from(
    [
        "",
        "..",
        "../x",
        "/",
        "frozen",
        "packed",
        "tied",
        "int8",
        "zstd",
        "blosc",
        "AAAA",
        "\x00",
        "é",
    ]
)
JUNK = [b"", b"0", b"9", b'"', b"}", b"[", b"\xff", b"-"]
VALUES = st.recursive(
    st.none() | st.booleans() | ODD_NUMBERS | ODD_WORDS | st.floats(allow_nan=False, width=16),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            ODD_WORDS | st.sampled_from(["$tuple", "$map", "$bytes", "$data", "$float", "$x"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=5,
)


@functools.cache
def good() -> MemoryStore:
    return hostile.sample()


def places(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all that can be replaced."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def changed(data: st.DataObject, body: Json) -> None:
    """Change something, somewhere: another value, nothing, twice, or what stands elsewhere."""
    there = list(places(body))
    *path, last = data.draw(st.sampled_from(there))
    parent = functools.reduce(lambda value, key: value[key], path, body)
    match data.draw(st.sampled_from(["value", "number", "number", "drop", "copy", "nudge"])):
        case "value":
            parent[last] = data.draw(VALUES)
        case "number":
            parent[last] = data.draw(ODD_NUMBERS)
        case "drop":
            del parent[last]
        case "copy":
            *from_path, key = data.draw(st.sampled_from(there))
            source = functools.reduce(lambda value, step: value[step], from_path, body)
            parent[last] = json.loads(json.dumps(source[key]))
        case "nudge" if isinstance(parent[last], int):
            parent[last] += data.draw(st.sampled_from([-64, -1, 1, 64]))
        case _:
            return


def try_all(store: Store) -> None:
    """Read it in every way; only the two errors that say "not this one" may escape."""
    for way in (hostile.read_all, hostile.check_all, hostile.find, hostile.clean):
        try:
            way(store)  # type: ignore[operator]
        except (CorruptError, NotFoundError) as error:
            assert len(str(error)) < 2000, way


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from([None, 0, 1, -1]))
def test_any_change_of_what_is_said(data: st.DataObject, writer: int | None) -> None:
    store = copied(good())
    name = f"{hostile.FOLDER}/{MANIFEST}" if writer is None else hostile.index_name(store, writer)
    body = json.loads(hostile.body_of(store.read(name)))
    for _ in range(data.draw(st.integers(1, 3))):
        changed(data, body)
    text = hostile.encoded(body)
    if writer is None:
        hostile.put_manifest(store, text)
    else:
        hostile.put_index(store, text, writer=writer)
    try_all(store)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from([None, 0, -1]))
def test_any_change_of_its_bytes(data: st.DataObject, writer: int | None) -> None:
    store = copied(good())
    name = f"{hostile.FOLDER}/{MANIFEST}" if writer is None else hostile.index_name(store, writer)
    text = bytearray(hostile.body_of(store.read(name)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        end = at + data.draw(st.integers(0, 3))
        text[at:end] = data.draw(
            st.sampled_from([b"", b"0", b"9", b'"', b"}", b"[", b"\xff", b"-"])
        )
    if writer is None:
        hostile.put_manifest(store, bytes(text))
    else:
        hostile.put_index(store, bytes(text), writer=writer)
    try_all(store)


def read_together(store: Store) -> list[WriterRecord]:
    """Read the indexes of all writers at once; return those that were read by themselves too.

    If they are not refused, each is as it is read by itself.
    """
    alone: list[WriterRecord] = []
    records = load_manifest(good(), hostile.FOLDER).writers
    files = [store.read(hostile.index_name(store, record.writer)) for record in records]

    def read(record: WriterRecord, data: bytes) -> PackIndex:
        alone.append(record)
        return read_index(data, origin="here")

    try:
        columns = read_indexes(records, files, read=read)
    except CorruptError:
        return alone
    found = [index_of(data) for data in files]
    assert [msgspec.to_builtins(index) for index in columns.indexes] == found
    return alone


def index_of(data: bytes) -> Json:
    return msgspec.to_builtins(read_index(data, origin="here"))


def test_good_indexes_are_checked_together() -> None:
    assert read_together(good()) == []


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from([(0,), (1,), (0, 1)]))
def test_faults_of_indexes_are_found_among_others(
    data: st.DataObject, writers: tuple[int, ...]
) -> None:
    store = copied(good())
    for writer in writers:
        body = json.loads(hostile.body_of(store.read(hostile.index_name(store, writer))))
        for _ in range(data.draw(st.integers(1, 2))):
            changed(data, body)
        hostile.put_index(store, hostile.encoded(body), writer=writer)
    read_together(store)


@given(st.binary(max_size=200) | VALUES.map(hostile.encoded))
def test_anything_at_all(body: bytes) -> None:
    for read in (read_manifest, read_index, read_note):
        for data in (body, hostile.sealed(body)):
            try:
                read(data, origin="here")
            except CkptError as error:
                assert isinstance(error, CorruptError)
                assert str(error).startswith("here")
