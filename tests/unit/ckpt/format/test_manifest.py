"""Valid content of a manifest or an index is accepted, and nothing else.

Every file here has the right checksum. Invalid content is refused by name, before anything outside
the checkpoint is accessed and before memory is allocated for its claims.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import hostile
import pytest
from checkpoint_states import copied
from doubles.memory_store import MemoryStore
from hostile import FOLDER, Change, check_all, encoded, find, read_all, sample, with_index

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import (
    MANIFEST,
    read_index,
    read_manifest,
    read_note,
    seal_note,
)
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.store.base import Store

Json = Any
MOST_BYTES = 16 << 20
HUGE = 10**18


@pytest.fixture(scope="module")
def good() -> MemoryStore:
    store = sample()
    read_all(store)
    assert check_all(store) == []
    return store


def put(*path: str | int, value: Json) -> Change:
    """Return a change that replaces what lies at a path."""

    def change(body: Json) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def both(*changes: Change) -> Change:
    def change(body: Json) -> None:
        for each in changes:
            each(body)

    return change


def drop(*path: str | int) -> Change:
    def change(body: Json) -> None:
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


def twice(*path: str | int) -> Change:
    def change(body: Json) -> None:
        for key in path:
            body = body[key]
        body.append(body[0])

    return change


def refused(store: Store, words: str) -> None:
    """Assert that every way to read the step refuses it, with these words, and cheaply."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError) as caught:
            read_all(store)
        assert words in str(caught.value), str(caught.value)
        assert FOLDER in str(caught.value)
        check_all(store)
        assert find(store) == 1
        hostile.clean(store)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def deep(levels: int) -> Json:
    value: Json = 0
    for _ in range(levels):
        value = [value]
    return value


BAD_PATHS = (
    "/etc/passwd",
    "../../etc/passwd",
    "data/../../x",
    "data/a/b",
    "data/..",
    "data/",
    "",
    "data/x\n",
    "data\\x",
    "step-000000000001/data/x",
    "../step-000000000001/data/x",
    "data/.hidden",
    "manifest.json",
)


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("where", ["pack", "index"])
def test_paths_stay_inside_the_step(good: MemoryStore, where: str, path: str) -> None:
    change = put("writers", 0, where, "path", value=path)
    refused(hostile.with_manifest(good, change), "not a path inside")


@pytest.mark.parametrize("path", ["refs2.json", "../refs.json", "data/x", "/tmp/refs.json"])
def test_the_reference_map_has_one_name(good: MemoryStore, path: str) -> None:
    refused(hostile.with_manifest(good, put("refs", "path", value=path)), "not a path inside")


@pytest.mark.parametrize(
    "path",
    [
        *(path for path in BAD_PATHS if not path.startswith("../step-")),
        "../step-000000000001/../../x",
        "../step-000000000001/index/x",
        "../step-1/data/x",
        "../step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661/data/x",
        f"../{FOLDER}/data/x",
    ],
)
def test_bases_are_packs_of_other_steps(good: MemoryStore, path: str) -> None:
    for change in (put("writers", 0, "bases", 0, "path", value=path),):
        refused(hostile.with_manifest(good, change), "not a pack of another step")
    store = with_index(good, put("bases", 0, "path", value=path))
    refused(hostile.with_manifest(store, change), "not a pack of another step")
    refused(store, "not a pack of another step")


CHUNK = ("tensors", "uneven", "chunks", 0)
PACKED = ("tensors", "packed", "chunks", 0)
FROZEN = ("tensors", "frozen", "chunks", 0)

BAD_INDEXES: dict[str, tuple[Change, str]] = {
    "a box outside": (put(*CHUNK, "box", "offset", value=[5]), "not a part"),
    "a box of another rank": (
        put(*CHUNK, "box", value={"offset": [0, 0], "shape": [1, 1]}),
        "rank",
    ),
    "a box that contradicts itself": (put(*CHUNK, "box", "shape", value=[1, 1]), "differ in rank"),
    "a negative offset": (put(*CHUNK, "box", "offset", value=[-1]), "negative"),
    "an empty box": (put(*CHUNK, "box", "shape", value=[0]), "empty"),
    "a huge box": (put(*CHUNK, "box", "shape", value=[HUGE]), "not a part"),
    "a huge shape": (put("tensors", "uneven", "shape", value=[HUGE]), "the manifest"),
    "a shape of many dims": (put("tensors", "uneven", "shape", value=[1] * 65), "65 dims"),
    "a shape no memory holds": (put("tensors", "uneven", "shape", value=[2**62] * 3), "memory"),
    "a negative shape": (put("tensors", "uneven", "shape", value=[-5]), "negative"),
    "an unknown type": (put("tensors", "uneven", "dtype", value="float7"), "float7"),
    "a cell of zero": (put("tensors", "padded", "cell", value=[0, 0]), "does not divide"),
    "a cell of another rank": (put("tensors", "padded", "cell", value=[2]), "does not divide"),
    "a huge cell": (put("tensors", "padded", "cell", value=[HUGE, HUGE]), "memory"),
    "chunks outside the pack": (put(*CHUNK, "at", value=HUGE), "ends behind"),
    "a negative place": (put(*CHUNK, "at", value=-64), "ends behind"),
    "a place of 10^30": (put(*CHUNK, "at", value=10**30), "ends behind"),
    "overlapping chunks": (twice(*CHUNK[:-1]), "the one before ends"),
    "a missing chunk": (put("tensors", "uneven", "chunks", value=[]), "chunks end at"),
    "other sizes": (put(*CHUNK, "nbytes", value=2), "2 bytes, its box has 1"),
    "block checksums of other size": (put(*CHUNK, "blocks", value="AAAAAAAA"), "block checksums"),
    "a base that is not there": (put(*FROZEN, "base", value=7), "base 7 of 1"),
    "a negative base": (put(*FROZEN, "base", value=-1), "base -1"),
    "a compressed size without codec": (put(*CHUNK, "stored", value=9), "without a codec"),
    "a codec without compressed size": (drop(*PACKED, "stored"), "without a codec"),
    "a negative compressed size": (put(*PACKED, "stored", value=-1), "cannot be"),
    "a compressed size of nothing": (put(*PACKED, "stored", value=0), "cannot be"),
    "an unknown codec": (put("tensors", "packed", "codec", "name", value="gzip"), "gzip"),
    "a codec's settings": (put("tensors", "packed", "codec", "level", value=99), "level 99"),
    "a checksum of 33 bits": (put(*CHUNK, "crc32c", value=1 << 32), "cannot have the checksums"),
    "a checksum of 65 bits": (put(*CHUNK, "crc64", value=1 << 64), "cannot have the checksums"),
    "a negative checksum": (put(*CHUNK, "crc32c", value=-1), "cannot have the checksums"),
    "another pack": (put("pack", value="data/other.pack"), "belongs to another pack"),
    "another writer": (put("writer", value=1), "belongs to another pack"),
    "another size of pack": (put("pack_bytes", value=HUGE), "the pack at"),
    "another step": (put("step", value=1), "not a pack of another step"),
    "another run": (put("run", value="x"), "run, step"),
    "another world": (put("world_size", value=10**12), "world size"),
    "a tensor too many": (
        put("tensors", "zzz", value={"dtype": "int8", "shape": [0], "cell": None, "chunks": []}),
        "none of that name",
    ),
    "other values": (put("values", "lr", value=0.1), "values of the indexes"),
    "other aliases": (put("aliases", "tied", value="packed"), "aliases of the indexes"),
    "a rank value that is no value": (put("rank_values", "rank", value={"$tuple": 3}), "$tuple"),
    "a format of the future": (put("format", value=3), "format 3"),
    "a format of the past": (put("format", value=0), "format 0"),
    "no tensors": (put("tensors", value=[]), "object"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_cannot_be_is_refused(good: MemoryStore, case: str) -> None:
    change, words = BAD_INDEXES[case]
    refused(with_index(good, change), words)


BAD_MANIFESTS: dict[str, tuple[Change, str]] = {
    "a world of 10^12": (put("world_size", value=10**12), "lists writers"),
    "no writers": (both(put("writers", value=[]), put("world_size", value=0)), "lists writers"),
    "a writer twice": (both(twice("writers"), put("world_size", value=3)), "lists writers"),
    "negative sizes": (put("writers", 0, "pack", "nbytes", value=-1), "cannot have -1 bytes"),
    "a checksum of 33 bits": (put("refs", "crc32c", value=1 << 32), "cannot have"),
    "huge sizes": (put("writers", 0, "pack", "nbytes", value=HUGE), "were written"),
    "a huge index": (put("writers", 0, "index", "nbytes", value=HUGE), "damaged"),
    "one file for two": (
        lambda body: put("writers", 1, "pack", value=body["writers"][0]["pack"])(body),
        "listed twice",
    ),
    "a base twice": (twice("writers", 0, "bases"), "listed twice by one writer"),
    "a merged pack of a writer": (put("merged", "writer", value=0), "merged"),
    "a huge tensor": (put("tensors", "uneven", "shape", value=[HUGE]), "the manifest"),
    "a tensor no memory holds": (put("tensors", "uneven", "shape", value=[2**40] * 2), "memory"),
    "a tensor without bytes": (
        put("tensors", "zzz", value={"dtype": "int8", "shape": [4], "cell": [4]}),
        "tensor zzz: 0 of 4 elements",
    ),
    "a tensor less": (drop("tensors", "packed"), "none of that name"),
    "another type": (put("tensors", "packed", "dtype", value="uint64"), "the manifest uint64"),
    "another codec": (drop("tensors", "packed", "codec"), "another codec"),
    "a cell of zero": (put("tensors", "packed", "cell", value=[0]), "does not divide"),
    "a loop of aliases": (put("aliases", value={"a": "b", "b": "a"}), "is no tensor"),
    "an alias of itself": (put("aliases", value={"a": "a"}), "is no tensor"),
    "an alias to nothing": (put("aliases", "tied", value="nothing"), "is no tensor"),
    "an alias over a tensor": (put("aliases", value={"frozen": "packed"}), "a tensor itself"),
    "an unknown tag": (put("values", "lr", value={"$exec": "x"}), "unknown tag '$exec'"),
    "a tuple of a number": (put("values", "lr", value={"$tuple": 3}), "$tuple of 3"),
    "a float of words": (put("values", "lr", value={"$float": "one"}), "$float of 'one'"),
    "bytes that are none": (put("values", "lr", value={"$bytes": "a"}), "base64"),
    "a map of numbers": (put("values", "lr", value={"$map": [1]}), "$map with 1"),
    "a map with a list as key": (put("values", "lr", value={"$map": [[[], 1]]}), "key of a dict"),
    "a map with a map as key": (put("values", "lr", value={"$map": [[{"$map": []}, 1]]}), "$map"),
    "a tensor by number": (put("values", "lr", value={"$tensor": 1}), "$tensor of 1"),
    "a small tensor that is large": (
        put("values", "lr", value={"$data": {"$bytes": "", "dtype": "int8", "shape": [HUGE]}}),
        "0 bytes for a tensor",
    ),
    "a small tensor of no type": (
        put("values", "lr", value={"$data": {"$bytes": "", "dtype": "x", "shape": [0]}}),
        "'x'",
    ),
    "deep values": (put("values", "lr", value=deep(300)), "deeper than 256"),
    "deep maps": (
        put("values", "lr", value=json.loads('{"$map":[[1,' * 150 + "0" + "]]}" * 150)),
        "deeper than 256",
    ),
    "another step": (put("step", value=7), "contains step 7"),
    "a mesh of words": (put("mesh", value={"dp": "x"}), "mesh"),
    "a null name": (put("run", value=None), "run"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_manifest_that_cannot_be_is_refused(good: MemoryStore, case: str) -> None:
    change, words = BAD_MANIFESTS[case]
    refused(hostile.with_manifest(good, change), words)


def test_two_chunks_of_one_place_in_a_base_are_refused(good: MemoryStore) -> None:
    def change(body: Json) -> None:
        body["tensors"]["frozen"]["chunks"][0]["at"] = 0
        body["tensors"]["padded"]["chunks"][0]["at"] = 0
        body["tensors"]["padded"]["chunks"][0]["base"] = 0

    with pytest.raises(CorruptError):
        read_all(with_index(good, change))


def test_a_padded_chunk_of_a_large_cell_ends_behind_its_pack(good: MemoryStore) -> None:
    change = put("tensors", "padded", "cell", value=[1 << 30, 2])
    refused(with_index(good, change, writer=1), "ends behind")


def test_a_bomb_is_not_unpacked(good: MemoryStore) -> None:
    """The frame says what the index says, and both are far more than it can hold."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"

    def change(body: Json) -> None:
        tensor = body["tensors"]["packed"]
        tensor["shape"] = [1 << 37]
        tensor["chunks"][0] |= {"nbytes": 1 << 40, "stored": len(frame)}
        tensor["chunks"][0]["box"] = {"offset": [0], "shape": [1 << 37]}

    refused(with_index(good, change), "cannot be the compressed form of 1099511627776 bytes")


@pytest.mark.parametrize("levels", [900, 5000, 100_000])
@pytest.mark.parametrize("pair", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused(good: MemoryStore, levels: int, pair: tuple[str, str]) -> None:
    value = pair[0] * levels + ("0" if pair[0] != "[" else "") + pair[1] * levels
    for version in (1, 2):
        store = copied(good)
        manifest = hostile.body_of(store.read(f"{FOLDER}/{MANIFEST}"))
        evil = manifest.replace(b'"values":{', b'"values":{"a":' + value.encode() + b",", 1)
        evil = evil.replace(b'"format":2', b'"format":%d' % version, 1)
        hostile.put_manifest(store, evil)
        with pytest.raises(CorruptError, match=r"nested|deep|recursion|values of the"):
            read_all(store)
        hostile.put_manifest(store, value.encode())
        with pytest.raises(CorruptError):
            read_all(store)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"run":"test"', b'"run":"test","run":"test"'),
        (b'"run":"test"', b'"run":"test","more":1'),
        (b'"run":"test"', b'"run": "test"'),
        (b'"lr":0.5', b'"lr":0.5,"lr":0.5'),
        (b'"lr":0.5', b'"lr":5e-1'),
        (b'"lr":0.5', b'"lr":1e999'),
        (b'"run":"test"', b'"run":"\\u0074est"'),
        (b'"run":"test"', b'"run":"\\ud800"'),
        (b'"run":"test"', b'"run":"\xff"'),
    ],
)
def test_there_is_one_spelling(good: MemoryStore, old: bytes, new: bytes) -> None:
    for name in (f"{FOLDER}/{MANIFEST}", hostile.index_name(good)):
        store = copied(good)
        body = hostile.body_of(store.read(name)).replace(old, new, 1)
        if name.endswith(MANIFEST):
            hostile.put_manifest(store, body)
        else:
            hostile.put_index(store, body)
        with pytest.raises(CorruptError, match=r"not a (Manifest|PackIndex)"):
            read_all(store)


def test_version_1_may_not_repeat_a_key_either(good: MemoryStore) -> None:
    body = hostile.body_of(good.read(f"{FOLDER}/{MANIFEST}")).replace(
        b'{"format":2,', b'{"format":1,"run":"x",', 1
    )
    with pytest.raises(CorruptError, match="a field occurs twice"):
        read_manifest(hostile.sealed(body), origin="here")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"\x00" * 100, b'{"crc32c":"00000001","body":}\n', b"[" * 10**6]
)
def test_what_is_no_envelope_is_refused(data: bytes) -> None:
    for read in (read_manifest, read_index, read_note):
        with pytest.raises(CorruptError, match="here: its checksum does not match"):
            read(data, origin="here")
        with pytest.raises(CorruptError, match="here"):
            read(hostile.sealed(data), origin="here")


def test_what_was_sealed_is_read(good: MemoryStore) -> None:
    data = good.read(f"{FOLDER}/{MANIFEST}")
    assert seal(read_manifest(data, origin="")) == data
    data = good.read(hostile.index_name(good))
    assert seal(read_index(data, origin="")) == data
    files = ["data/a.pack", "index/a.json", "refs.json"]
    assert read_note(seal_note(files), origin="") == files


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_note_leads_to_no_file_outside(path: str) -> None:
    with pytest.raises(CorruptError, match="not a path inside"):
        read_note(seal_note(["data/a.pack", path]), origin="here")


def test_values_of_every_kind_are_fine(good: MemoryStore) -> None:
    value = {
        "a": [None, True, 10**30, -0.0, 1e308, "é", {"$float": "-inf"}, {"$bytes": "AAE="}],
        "b": {"$map": [[{"$tuple": [1, {"$float": "nan"}]}, {"$tuple": []}], [None, {}]]},
        "c": {"$tensor": "frozen"},
        "d": {"$rank": "rng"},
        "e": {"$data": {"$bytes": "AAAAAA==", "dtype": "int16", "shape": [1, 2]}},
        "f": {"$a": 1, "$b": 2},
        "g": deep(250),
    }
    store = with_index(good, put("values", "lr", value=value))
    store = hostile.with_manifest(store, put("values", "lr", value=value))
    read_all(store)
    assert encoded(value)


def test_an_index_that_was_read_before_is_refused_once_its_bytes_change(good: MemoryStore) -> None:
    check_all(good)
    refused(with_index(good, put("format", value=3)), "format 3")
    check_all(good)
