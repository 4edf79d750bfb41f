"""Unchanged tensors are stored as references, and their packs stay as long as they are needed."""

from __future__ import annotations

import logging

import msgspec
import pytest
from checkpoint_states import FROZEN, files_of, held, needed_files, save
from doubles.checkpoints import shard, split_dim
from doubles.memory_store import MemoryStore
from doubles.pruning import prune, remove
from fault_stores import using

from holdfast.ckpt.checkpoints import commit
from holdfast.ckpt.checkpoints.bases import needed_packs
from holdfast.ckpt.checkpoints.catalog import load_manifest, step_folder
from holdfast.ckpt.checkpoints.retention import sweep
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CorruptError, StoreError
from holdfast.ckpt.store.base import Store


def pack_bytes(store: Store, step: int) -> int:
    return sum(record.pack.nbytes for record in load_manifest(store, step_folder(step)).writers)


def bases(store: Store, step: int) -> set[str]:
    return {path.split("/")[1] for path in load_manifest(store, step_folder(step)).bases()}


def test_only_what_changed_is_written() -> None:
    with using(store := MemoryStore()):
        save(1, 10)
        save(2, 20, base=1)
        save(3, 20, base=2)
    assert pack_bytes(store, 1) > FROZEN.nbytes
    assert pack_bytes(store, 2) < 300
    assert pack_bytes(store, 3) == 0
    assert held(store) == {1: 10, 2: 20, 3: 20}
    assert bases(store, 3) == {step_folder(1), step_folder(2)}, "no reference leads to another"


def test_another_number_of_writers_shares_what_is_cut_alike() -> None:
    with using(store := MemoryStore()):
        save(1, 10, world_size=2)
        save(2, 20, world_size=1, base=1)
        save(3, 30, world_size=2, base=1)
        save(4, 40, world_size=3, base=1)
    assert bases(store, 2) == set()
    assert bases(store, 3) == {step_folder(1)}
    assert held(store) == {1: 10, 2: 20, 3: 30, 4: 40}


@pytest.mark.parametrize("fault", ["gone", "manifest", "index", "pack", "renamed"])
def test_a_base_that_cannot_be_read_costs_nothing_but_room(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with using(store := MemoryStore()):
        save(1, 10)
        record = load_manifest(store, step_folder(1)).writers[0]
        name = {"manifest": "manifest.json", "index": record.index.path, "pack": record.pack.path}
        if fault == "renamed":
            for path in files_of(store):
                store.write(path.replace("01/", "05/"), [store.read(path)])
        elif fault != "gone":
            path = f"{step_folder(1)}/{name[fault]}"
            store.write(path, [store.read(path)[:-1]])
        number = {"gone": 7, "renamed": 5}.get(fault, 1)
        with caplog.at_level(logging.WARNING):
            save(2, 20, base=number)
        assert "step 2 is saved in full" in caplog.text
        assert bases(store, 2) == set()


def test_no_step_refers_to_its_own_folder() -> None:
    """Step 1 is saved again with step 2 as base, which has it from step 1."""
    with using(store := MemoryStore()):
        save(1, 10)
        save(2, 20, base=1)
        save(1, 11, base=2, generation=2)
        assert bases(store, 1) == set()
        assert held(store) == {1: 11, 2: 20}
        remove("", 2)
        save(1, 11, base=2, generation=2)
        assert held(store) == {1: 11}
        assert files_of(store) == needed_files(store)


def receipts_of(step: int, *, base: int | None) -> list[commit.WriterReceipt]:
    """Write a pack that refers to a base, and do not commit it."""
    arrays = {"w": (FROZEN, "float32")}
    boxes = {"w": split_dim(FROZEN.shape, parts=1)}
    index, payload = shard(arrays, boxes, writer=0, world_size=1, step=step)
    options = commit.PackOptions(base=base)
    view = memoryview(payload)
    return [commit.write_pack("", step=step, index=index, payload=view, options=options)]


def only_frozen(step: int) -> None:
    receipts = receipts_of(step, base=None)
    commit.commit("", run="test", step=step, generation=1, receipts=receipts, mesh={})


@pytest.mark.parametrize("meanwhile", ["removed", "saved again"])
def test_a_base_that_goes_before_the_commit_is_noticed(meanwhile: str) -> None:
    with using(store := MemoryStore()):
        only_frozen(1)
        receipts = receipts_of(2, base=1)
        if meanwhile == "removed":
            remove("", 1)
        else:
            save(1, 11, run="another")
        with pytest.raises(StoreError, match=r"step-000000000001.* removed or saved again"):
            commit.commit("", run="test", step=2, generation=1, receipts=receipts, mesh={})
        assert needed_packs(store), "an unfinished save holds back what it refers to"


def test_an_unfinished_save_holds_its_base_back() -> None:
    with using(store := MemoryStore()):
        only_frozen(1)
        save(3, 30)
        receipts_of(2, base=1)
        prune("", keep_last=1)
        needed = needed_packs(store)
        assert needed
        assert all(store.size(name) for name in needed)


def test_a_damaged_index_holds_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    with using(store := MemoryStore()):
        only_frozen(1)
        receipts_of(2, base=1)
        (index,) = (name for name in files_of(store) if name.startswith(f"{step_folder(2)}/index"))
        good = store.read(index)
        store.write(index, [good[:-1]])
        save(3, 30)
        before = files_of(store)
        prune("", keep_last=1)
        assert {name for name in before - files_of(store) if "/data/" in name} == set()
        assert "no pack of a removed step is deleted" in caplog.text
        store.write(index, [good])
        sweep(store)
        assert {name for name in before - files_of(store) if "/data/" in name} == set()


def test_a_damaged_manifest_does_not_cost_the_step_its_base() -> None:
    """It may be restored from a copy: its index still names the packs that it needs."""
    with using(store := MemoryStore()):
        save(1, 10)
        save(2, 20, base=1)
        save(3, 30)
        name = f"{step_folder(2)}/manifest.json"
        good = store.read(name)
        store.write(name, [good[:-5]])
        remove("", 1)
        store.write(name, [good])
        assert held(store) == {2: 20, 3: 30}


def test_a_receipt_says_what_it_refers_to() -> None:
    with using(MemoryStore()):
        only_frozen(1)
        (receipt,) = receipts_of(2, base=1)
        data = msgspec.json.encode(receipt)
        assert msgspec.json.decode(data, type=commit.WriterReceipt) == receipt
        assert receipt.files.base is not None
        assert receipt.files.base.step == 1


def test_a_lost_base_is_named() -> None:
    with using(store := MemoryStore()):
        save(1, 10)
        save(2, 20, base=1)
        (path,) = load_manifest(store, step_folder(2)).bases()
        name = path.removeprefix("../")
        store.delete([name])
        with pytest.raises(CorruptError, match=f"{name}: missing"):
            StoreSource("", 2)
