"""The Zarr store of a checkpoint: zarr's own store tests, and the additional promises."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from doubles.checkpoints import sample_arrays, write_checkpoint
from zarr.abc.store import (
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
    SupportsDeleteSync,
    SupportsSetSync,
)
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.store import StoreTests
from zarr_samples import of_every_dtype

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CorruptError, ImmutableError, StoreError
from holdfast.ckpt.format.zarr_metadata import Stored, array_name
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.zarr.store import CheckpointStore
from holdfast.ckpt.zarr.view import group

REFUSED = "store was opened in read-only mode and does not support writing"
PROTOTYPE = default_buffer_prototype()


class Pack:
    """One pack in a file."""

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        path.touch()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pack) and self.origin == other.origin

    def __hash__(self) -> int:
        return hash(self.origin)

    def read_range(self, path: str, at: int, nbytes: int) -> bytes:
        assert path == "data/0.pack"
        return Path(self.origin).read_bytes()[at : at + nbytes]


class TestCheckpointStore(StoreTests[CheckpointStore, cpu.Buffer]):
    """zarr's tests, in full; the store refuses their writes.

    If they write only in order to read, the bytes get there as a saver puts them: documents in
    memory, the rest in a pack.
    """

    store_cls = CheckpointStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"ranges": Pack(tmp_path / "pack"), "documents": {}, "places": {}}

    async def set(self, store: CheckpointStore, key: str, value: Buffer) -> None:
        data = value.to_bytes()
        if key.endswith("zarr.json"):
            store._documents[key] = data  # type: ignore[index]
            return
        path = Path(store._ranges.origin)
        place = Stored(path="data/0.pack", at=path.stat().st_size, nbytes=len(data))
        store._places[key] = place  # type: ignore[index]
        with path.open("ab") as file:
            file.write(data)

    async def get(self, store: CheckpointStore, key: str) -> Buffer:
        place = store._places[key]
        data = Path(store._ranges.origin).read_bytes()[place.at : place.at + place.nbytes]
        return self.buffer_cls.from_bytes(data)

    @pytest.fixture
    def filled_by_hand(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> Store:
        """The store, its ``set`` replaced by ours for the length of the test."""

        async def put(key: str, value: Buffer) -> None:
            await self.set(store, key, value)

        monkeypatch.setattr(store, "set", put)
        return store

    def test_store_repr(self, store: CheckpointStore) -> None:
        assert repr(store) == f"CheckpointStore({store._ranges.origin!r})"

    def test_store_supports_writes(self, store: CheckpointStore) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: CheckpointStore) -> None:
        assert store.supports_listing

    async def test_serializable_store(self, store: CheckpointStore) -> None:
        await self.set(store, "foo", self.buffer_cls.from_bytes(b"\x01\x02"))
        again = pickle.loads(pickle.dumps(store))
        assert again == store
        assert hash(again) == hash(store)
        assert again.read_only
        found = await again.get("foo", prototype=PROTOTYPE)
        assert found.to_bytes() == b"\x01\x02"

    def test_store_read_only(self, store: CheckpointStore) -> None:
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False  # type: ignore[misc]

    @pytest.mark.parametrize("read_only", [True, False])
    async def test_store_open_read_only(self, open_kwargs: dict[str, Any], read_only: bool) -> None:
        if read_only:
            await super().test_store_open_read_only(open_kwargs, True)
            return
        with pytest.raises(ImmutableError, match=REFUSED):
            await self.store_cls.open(**open_kwargs, read_only=False)

    async def test_another_read_only_store_can_be_had(self, store: CheckpointStore) -> None:
        again = store.with_read_only(True)
        assert again == store
        assert again.read_only
        assert not again._is_open

    async def test_getsize_prefix(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_getsize_prefix(filled_by_hand)

    async def test_exists(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_exists(filled_by_hand)

    async def test_list(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_list(filled_by_hand)

    async def test_list_prefix(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_list_prefix(filled_by_hand)

    async def test_list_empty_path(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_list_empty_path(filled_by_hand)

    async def test_list_dir(self, filled_by_hand: CheckpointStore) -> None:
        await super().test_list_dir(filled_by_hand)

    @pytest.mark.parametrize("key", ["zarr.json", "c/0", "foo/c/0.0", "foo/0/0"])
    @pytest.mark.parametrize("data", [b"\x01\x02\x03\x04", b""])
    async def test_set(self, store: CheckpointStore, key: str, data: bytes) -> None:
        with pytest.raises(ImmutableError, match=REFUSED):
            await store.set(key, self.buffer_cls.from_bytes(data))
        assert not await store.exists(key)

    async def test_set_not_open(self, store_not_open: CheckpointStore) -> None:
        with pytest.raises(ImmutableError, match=REFUSED):
            await store_not_open.set("c/0", self.buffer_cls.from_bytes(b"\x01"))

    async def test_set_many(self, store: CheckpointStore) -> None:
        with pytest.raises(ImmutableError, match=REFUSED):
            await store._set_many([("c/0", self.buffer_cls.from_bytes(b"\x01"))])

    async def test_set_if_not_exists(self, store: CheckpointStore) -> None:
        await self.set(store, "k", self.buffer_cls.from_bytes(b"0000"))
        for key in ("k", "k2"):
            with pytest.raises(ImmutableError, match=REFUSED):
                await store.set_if_not_exists(key, self.buffer_cls.from_bytes(b"1111"))
        found = await store.get("k", PROTOTYPE)
        assert found is not None
        assert found.to_bytes() == b"0000"

    async def test_delete(self, store: CheckpointStore) -> None:
        await self.set(store, "foo/zarr.json", self.buffer_cls.from_bytes(b"bar"))
        with pytest.raises(ImmutableError, match=REFUSED):
            await store.delete("foo/zarr.json")
        assert await store.exists("foo/zarr.json")

    async def test_delete_dir(self, store: CheckpointStore) -> None:
        await self.set(store, "foo/zarr.json", self.buffer_cls.from_bytes(b"bar"))
        with pytest.raises(NotImplementedError):
            await store.delete_dir("foo")
        assert await store.exists("foo/zarr.json")

    async def test_delete_nonexistent_key_does_not_raise(self, store: CheckpointStore) -> None:
        with pytest.raises(ImmutableError, match=REFUSED):  # even of what is not there
            await store.delete("nonexistent_key")

    async def test_clear(self, store: CheckpointStore) -> None:
        await self.set(store, "key", self.buffer_cls.from_bytes(b"something"))
        with pytest.raises(NotImplementedError):
            await store.clear()
        assert not await store.is_empty("")

    def test_set_sync(self, store: CheckpointStore) -> None:
        assert not isinstance(store, SupportsSetSync)

    def test_delete_sync(self, store: CheckpointStore) -> None:
        assert not isinstance(store, SupportsDeleteSync)

    def test_delete_sync_missing(self, store: CheckpointStore) -> None:
        assert not isinstance(store, SupportsDeleteSync)

    @pytest.mark.parametrize(
        ("request_", "wanted"),
        [
            (RangeByteRequest(0, 99), b"abcd"),
            (RangeByteRequest(2, 2), b""),
            (RangeByteRequest(7, 9), b""),
            (OffsetByteRequest(4), b""),
            (OffsetByteRequest(9), b""),
            (SuffixByteRequest(0), b""),
            (SuffixByteRequest(9), b"abcd"),
        ],
    )
    @pytest.mark.parametrize("key", ["c/0", "zarr.json"])
    async def test_ranges_end_where_the_value_ends(
        self, store: CheckpointStore, key: str, request_: Any, wanted: bytes
    ) -> None:
        await self.set(store, "c/9", self.buffer_cls.from_bytes(b"before"))
        await self.set(store, key, self.buffer_cls.from_bytes(b"abcd"))
        await self.set(store, "c/8", self.buffer_cls.from_bytes(b"behind"))
        found = await store.get(key, PROTOTYPE, request_)
        assert found is not None
        assert found.to_bytes() == wanted

    @pytest.mark.parametrize(
        "bad",
        [
            RangeByteRequest(-2, 3),
            RangeByteRequest(3, 2),
            OffsetByteRequest(-1),
            SuffixByteRequest(-1),
        ],
    )
    @pytest.mark.parametrize("key", ["c/0", "zarr.json"])
    async def test_ranges_that_make_no_sense_are_refused(
        self, store: CheckpointStore, key: str, bad: Any
    ) -> None:
        await self.set(store, key, self.buffer_cls.from_bytes(b"abcd"))
        with pytest.raises(ValueError, match="Unexpected byte_range"):
            await store.get(key, PROTOTYPE, bad)


@pytest.fixture
def saved(tmp_path: Path) -> StoreSource:
    write_checkpoint(tmp_path, of_every_dtype(), world_size=3, aliases={"t.tied": "t.bfloat16"})
    return StoreSource(tmp_path, 1)


@pytest.mark.parametrize("portable", [False, True])
def test_a_group_has_every_dtype_bit_for_bit(saved: StoreSource, portable: bool) -> None:
    found = group(saved, portable=portable)
    arrays = of_every_dtype()
    assert set(found.array_keys()) == {*map(array_name, arrays), "t.tied"}
    for fqn, (wanted, dtype) in {**arrays, "t.tied": arrays["t.bfloat16"]}.items():
        array = found[array_name(fqn)]
        assert isinstance(array, zarr.Array)
        assert array.attrs["torch_dtype"] == dtype
        assert array.metadata.to_dict()["data_type"] == DTYPES[dtype].zarr_name(portable=portable)
        data = np.asarray(array[...])
        assert data.tobytes() == wanted.tobytes(), fqn
        assert portable == (data.dtype == DTYPES[dtype].numpy) or DTYPES[dtype].registered is None


def test_a_group_opens_again_where_it_is_pickled_to(saved: StoreSource) -> None:
    array = group(saved)["t.bfloat16"]
    again = pickle.loads(pickle.dumps(array))
    assert again.store == array.store
    assert np.asarray(again[...]).tobytes() == np.asarray(array[...]).tobytes()


def test_a_pickled_group_of_a_step_that_was_saved_again_is_refused(
    saved: StoreSource, tmp_path: Path
) -> None:
    data = pickle.dumps(group(saved))
    write_checkpoint(tmp_path, sample_arrays(seed=9), world_size=3)
    with pytest.raises(CorruptError, match="saved again"):
        pickle.loads(data)


def test_writing_is_refused_with_what_to_do(saved: StoreSource) -> None:
    found = group(saved)
    array = found["t.float32"]
    assert isinstance(array, zarr.Array)
    with pytest.raises(StoreError, match="immutable; save another step"):
        array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        found.create_array("more", shape=(1,), dtype="f4")
    with pytest.raises((ValueError, NotImplementedError), match="read-only"):
        zarr.open_group(found.store, mode="a")


@pytest.mark.parametrize("portable", [False, True])
def test_a_missing_chunk_is_an_error_never_a_fill_value(saved: StoreSource, portable: bool) -> None:
    array = group(saved, portable=portable)["t.bfloat16"]
    assert isinstance(array, zarr.Array)
    store = array.store
    assert isinstance(store, CheckpointStore)
    lost = [key for key in store._places if key.startswith("t.bfloat16/c/1")]
    for key in lost:
        del store._places[key]  # type: ignore[attr-defined]
    assert lost
    with pytest.raises(CorruptError, match=r"array t\.bfloat16: no pack holds its chunk c/1"):
        array[...]


def test_a_missing_chunk_of_a_scalar_is_an_error_too() -> None:
    store = CheckpointStore(_Nothing(), {"t/zarr.json": b"{}"}, {})
    with pytest.raises(CorruptError, match="chunk c;"):
        store.get_sync("t/c")
    assert store.get_sync("t/.zattrs") is None
    assert store.get_sync("c/c") is None


class _Nothing:
    origin = "nothing"

    def read_range(self, path: str, at: int, nbytes: int) -> bytes:
        raise AssertionError(path)


@pytest.mark.parametrize("portable", [False, True])
def test_a_flipped_byte_is_noticed(saved: StoreSource, portable: bool) -> None:
    found = group(saved, portable=portable)
    store = found.store
    assert isinstance(store, CheckpointStore)
    place = next(p for key, p in store._places.items() if key.startswith("t.float8_e5m2/c/0"))
    path = Path(saved.store.where(f"{saved.folder}/{place.path}"))
    data = bytearray(path.read_bytes())
    data[place.at] ^= 1
    path.write_bytes(data)
    array = found["t.float8_e5m2"]
    assert isinstance(array, zarr.Array)
    with pytest.raises(ValueError, match="checksum"):  # by Zarr's own codec
        array[...]


def test_a_chunk_in_the_place_of_another_is_noticed(saved: StoreSource) -> None:
    found = group(saved)
    store = found.store
    assert isinstance(store, CheckpointStore)
    first, second = (store._places[f"t.{name}/c/0/0"] for name in ("uint8", "int8"))
    path = Path(saved.store.where(f"{saved.folder}/{first.path}"))
    data = bytearray(path.read_bytes())
    data[first.at : first.at + first.nbytes] = data[second.at : second.at + second.nbytes]
    path.write_bytes(data)
    array = found["t.uint8"]
    assert isinstance(array, zarr.Array)
    with pytest.raises(CorruptError, match=r"not those of chunk t\.uint8/c/0/0"):
        array[...]


async def test_many_reads_at_once_get_each_its_own_bytes(saved: StoreSource) -> None:
    store = group(saved).store
    assert isinstance(store, CheckpointStore)
    keys = [*store._documents, *store._places] * 5
    found = await asyncio.gather(*(store.get(key, PROTOTYPE) for key in keys))
    for key, data in zip(keys, found, strict=True):
        alone = store.get_sync(key)
        assert data is not None
        assert alone is not None
        assert data.to_bytes() == alone.to_bytes()
        assert len(data) == await store.getsize(key)
