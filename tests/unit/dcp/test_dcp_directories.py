"""Directories that torch.distributed.checkpoint writes and reads, as sources and sinks."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import bits, build, mixed, put_back, same, state_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from holdfast import ckpt
from holdfast.adapters.dcp import DcpSink, DcpSource, HoldfastReader
from holdfast.adapters.dcp.names import leaves
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.checkpoint import CheckpointSink, CheckpointSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError, StateError, StoreError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.state import plain

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)


def boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    yield whole(shape)
    if shape and min(shape) > 1:
        yield Box(offset=tuple(1 for _ in shape), shape=tuple(n - 1 for n in shape))
        yield Box(offset=tuple(n - 1 for n in shape), shape=tuple(1 for _ in shape))


def pour(source: DcpSource, sink: DcpSink, aliases: dict[str, str] | None = None) -> None:
    """Convert, in boxes of a row each."""
    sink.begin(source.specs, aliases=aliases or {}, values=source.values, step=1)
    for fqn, spec in source.specs.items():
        rows = spec.shape[0] if spec.shape else 1
        for row in range(rows):
            offset = (row, *(0 for _ in spec.shape[1:])) if spec.shape else ()
            box = Box(offset=offset, shape=(1, *spec.shape[1:]) if spec.shape else ())
            sink.write(fqn, box, source.read(fqn, box))
    sink.finish()


def test_a_directory_of_dcp_is_read_box_by_box(tmp_path: Path) -> None:
    saved = mixed(1)
    dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    flat = {
        ".".join(map(str, path)): leaf
        for path, leaf in leaves((), saved)
        if isinstance(leaf, torch.Tensor)
    }
    flat |= {"a.b.list.0": saved["a.b"]["list"][0]}
    with DcpSource(tmp_path / "theirs") as source:
        assert source.specs.keys() == flat.keys()
        for fqn, tensor in flat.items():
            for box in boxes(tuple(tensor.shape)):
                assert bytes(source.read(fqn, box)) == bits(tensor[box.slices]), (fqn, box)
        assert source.values["plain.tuple"] == {"$tuple": [1, "text", {"$bytes": "Ynl0ZXM="}]}
        assert source.values["infinite"] == {"$float": "inf"}
        with pytest.raises(NotFoundError, match="no tensor 'nothing'"):
            source.read("nothing", whole(()))


def test_what_the_sink_writes_plain_dcp_reads(tmp_path: Path) -> None:
    saved = mixed(1)
    dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    with DcpSource(tmp_path / "theirs") as source:
        sink = DcpSink(tmp_path / "again", file_bytes=100)
        pour(source, sink, aliases={"tied": "a.b.c.d"})
    assert len(list((tmp_path / "again").glob("*.distcp"))) > 3
    dcp_to_torch_save(tmp_path / "again", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(found, saved | {"tied": saved["a.b"]["c.d"]})
    assert not list(tmp_path.glob(".*"))


def test_what_ckpt_save_wrote_becomes_a_directory_for_plain_dcp(tmp_path: Path) -> None:
    parts, others = build(3), build(2)
    native = dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))
    ckpt.save(tmp_path / "ours", native, step=3)
    ours = CheckpointSource(StoreSource(tmp_path / "ours", 3))
    with ours, DcpSink(tmp_path / "theirs") as sink:
        transfer(ours, sink, step=3)
    state = state_of(*others)
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    put_back(others, state)
    assert same(state_of(*others), state_of(*parts))


def test_a_directory_becomes_a_checkpoint_and_a_directory_again(tmp_path: Path) -> None:
    parts = build(2)
    saved = mixed(1) | state_of(*parts)
    dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    with DcpSource(tmp_path / "theirs") as source, CheckpointSink(tmp_path / "ours") as sink:
        transfer(source, sink, step=5)
    assert same(rebuilt(HoldfastReader(tmp_path / "ours", step=5)), rebuilt_by_torch(saved))
    ours = CheckpointSource(StoreSource(tmp_path / "ours", 5))
    with ours, DcpSink(tmp_path / "again") as again:
        transfer(ours, again)
    assert same(rebuilt(dcp.FileSystemReader(tmp_path / "again")), rebuilt_by_torch(saved))


def rebuilt(reader: dcp.StorageReader) -> dict[str, Any]:
    return _load_state_dict_from_keys(storage_reader=reader)


def rebuilt_by_torch(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that DCP builds without a target: plain dicts, empty ones left out."""
    return {
        key: rebuilt_by_torch(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if value != {}
    }


def test_a_part_can_be_converted(tmp_path: Path) -> None:
    parts = build(1)
    tree = {"tree": Tree(), "model": parts[0]}
    ckpt.save(tmp_path / "ours", tree, step=3)
    ours = CheckpointSource(StoreSource(tmp_path / "ours", 3))
    with ours, DcpSink(tmp_path / "theirs") as sink:
        transfer(ours, sink, select=["tree", "tree.a", "model.body.*"])
    found = rebuilt(dcp.FileSystemReader(tmp_path / "theirs"))
    assert found.keys() == {"tree", "model"}
    assert found["tree"]["list"] == [1, 2]
    assert same(found["tree"]["a"], torch.ones(2))
    assert found["model"].keys() == {"body.weight", "body.bias"}


class Tree:
    """An object with tensors in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": torch.ones(2), "b": torch.zeros(3), "list": [1, 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_sink_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "theirs")
    source, sink = DcpSource(tmp_path / "theirs"), DcpSink(tmp_path / "new")
    sink.begin(source.specs, aliases={}, values={}, step=None)
    sink.write("w", whole((4,)), source.read("w", whole((4,))))
    assert not (tmp_path / "new").exists()
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    with pytest.raises(StoreError, match="already exists and is not overwritten"):
        DcpSink(tmp_path / "theirs").begin(source.specs, aliases={}, values={}, step=None)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write it"):
        DcpSink(tmp_path / "file" / "x").begin(source.specs, aliases={}, values={}, step=None)
    with pytest.raises(MismatchError, match=r"w: 3 bytes for Box"):
        sink.write("w", whole((4,)), memoryview(b"abc"))


class Touch:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/.metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(StateError, match=r"names pathlib\S*Path.touch|names builtins.getattr"):
        DcpSource(tmp_path / "bad")
    for bad in (os.system, eval, torch.load, torch.hub.load, DcpSink):
        (tmp_path / "bad/.metadata").write_bytes(pickle.dumps(bad))
        with pytest.raises(StateError, match=r"its pickle names"):
            DcpSource(tmp_path / "bad")
    assert not (tmp_path / "touched").exists()


def test_a_pickle_cannot_change_the_classes_it_may_name(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    change = b"(ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'version'\nS'x'\nstb."
    (tmp_path / "bad/.metadata").write_bytes(b"\x80\x02" + change.replace(b"(c", b"c", 1))
    with pytest.raises(CorruptError):
        DcpSource(tmp_path / "bad")
    assert dcp.metadata.Metadata.version is None


def test_every_cut_of_the_metadata_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "n": 1}, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    for end in range(0, len(data), 7):
        (tmp_path / ".metadata").write_bytes(data[:end])
        with pytest.raises((CorruptError, StateError)):
            DcpSource(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(NotFoundError, match=r"no \.metadata"):
        DcpSource(tmp_path)


def change_metadata(path: Path, change: Callable[[dcp.metadata.Metadata], None]) -> None:
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def test_damaged_directories_are_named(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        dcp.save({"w": torch.ones(40), "n": 1}, checkpoint_id=tmp_path / name)
        return tmp_path / name

    with pytest.raises(CorruptError, match="missing, and the metadata lists n in it"):
        (fresh("a") / "__0_0.distcp").unlink()
        DcpSource(tmp_path / "a")
    os.truncate(fresh("b") / "__0_0.distcp", 2200)
    with pytest.raises(CorruptError, match="tensor w at offset"):
        DcpSource(tmp_path / "b").read("w", whole((40,)))

    def elsewhere(metadata: dcp.metadata.Metadata) -> None:
        metadata.storage_data[MetadataIndex("n")].relative_path = "../b/__0_0.distcp"

    with pytest.raises(CorruptError, match="outside it"):
        change_metadata(fresh("c"), elsewhere)
        DcpSource(tmp_path / "c")

    def halved(metadata: dcp.metadata.Metadata) -> None:
        found = metadata.state_dict_metadata["w"]
        assert isinstance(found, TensorStorageMetadata)
        found.chunks[0].sizes = torch.Size([20])

    with pytest.raises(CorruptError, match="w: its chunks are not the whole tensor"):
        change_metadata(fresh("d"), halved)
        DcpSource(tmp_path / "d")

    def larger(metadata: dcp.metadata.Metadata) -> None:
        found = metadata.state_dict_metadata["w"]
        assert isinstance(found, TensorStorageMetadata)
        found.size = found.chunks[0].sizes = torch.Size([100])

    change_metadata(fresh("e"), larger)
    with pytest.raises(CorruptError, match=r"holds \('float32', \(40,\)\), not"):
        DcpSource(tmp_path / "e").read("w", whole((100,)))


@pytest.mark.parametrize("opcode", [b"r", b"p"])
def test_nine_bytes_cannot_claim_gigabytes(tmp_path: Path, opcode: bytes) -> None:
    number = (2**31 - 1).to_bytes(4, "little") if opcode == b"r" else b"2147483647\n"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02N" + opcode + number + b".")
    with pytest.raises(CorruptError, match="memo entry 2147483647 of 0"):
        DcpSource(tmp_path)


def test_every_protocol_of_pickle_is_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(40), "n": 1}, checkpoint_id=tmp_path)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(found, protocol=protocol))
        assert list(DcpSource(tmp_path).specs) == ["w"]


def _set(**fields: Any) -> Callable[[dcp.metadata.Metadata], None]:
    def change(metadata: dcp.metadata.Metadata) -> None:
        for name, value in fields.items():
            setattr(metadata, name, value)

    return change


def _tensor(**fields: Any) -> Callable[[dcp.metadata.Metadata], None]:
    def change(metadata: dcp.metadata.Metadata) -> None:
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["w"], name, value)

    return change


def _place(**fields: Any) -> Callable[[dcp.metadata.Metadata], None]:
    def change(metadata: dcp.metadata.Metadata) -> None:
        (index,) = (each for each in metadata.storage_data if each.fqn == "w")
        for name, value in fields.items():
            setattr(metadata.storage_data[index], name, value)

    return change


def _large(metadata: dcp.metadata.Metadata) -> None:
    huge = torch.Size([2**40, 2**20])
    _tensor(size=huge)(metadata)
    metadata.state_dict_metadata["w"].chunks[0].sizes = huge
    metadata.state_dict_metadata["w"].chunks[0].offsets = torch.Size([0, 0])
    (index,) = (each for each in metadata.storage_data if each.fqn == "w")
    metadata.storage_data[MetadataIndex("w", [0, 0])] = metadata.storage_data.pop(index)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set(state_dict_metadata=[1, 2]), "entries are not a dict of names"),
        (_set(state_dict_metadata={"w": 1}), "'w': is neither a tensor nor an object"),
        (_set(storage_data=[1]), "places are not a dict of indices"),
        (_set(storage_data={1: 2}), "places are not a dict of indices"),
        (_set(planner_data={"w": (("x", 1.5),)}), "'w': its path is not of names"),
        (_tensor(size=("a", None)), "'w': size .* is not a shape"),
        (_tensor(chunks=[3]), "'w': its chunks are not boxes"),
        (_tensor(properties=3), "'w': has no properties"),
        (lambda m: delattr(m, "state_dict_metadata"), "no attribute 'state_dict_metadata'"),
        (lambda m: delattr(m.state_dict_metadata["w"], "chunks"), "no attribute 'chunks'"),
        (_place(relative_path=".."), "w: lies at '..', outside it"),
        (_place(relative_path=3), "w: lies at 3, outside it"),
        (_place(offset=2**62, length=2**62), "w: lies at"),
        (_place(offset="x"), "w: lies at"),
        (_place(length=10**9), "is cut off"),
        (_large, r"w: \d+ bytes, \d+ are stored"),
    ],
)
def test_metadata_that_claims_what_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[dcp.metadata.Metadata], None], said: str
) -> None:
    dcp.save({"w": torch.ones(40), "n": 1}, checkpoint_id=tmp_path)
    change_metadata(tmp_path, change)
    with pytest.raises((CorruptError, StateError), match=said):
        DcpSource(tmp_path).read("w", whole((40,)))


def test_pipes_and_devices_do_not_stop_the_reader(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(40)}, checkpoint_id=tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    with pytest.raises(CorruptError, match="not a regular file"):
        DcpSource(tmp_path).read("w", whole((40,)))
    (tmp_path / "__0_0.distcp").unlink()
    (tmp_path / "__0_0.distcp").symlink_to("/dev/zero")
    with pytest.raises(CorruptError, match="not a regular file"):
        DcpSource(tmp_path).read("w", whole((40,)))
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(CorruptError, match="not a regular file"):
        DcpSource(tmp_path)


def test_streams_of_bytes_in_a_directory_are_kept(tmp_path: Path) -> None:
    dcp.save({"s": io.BytesIO(b"abc"), "w": torch.ones(1)}, checkpoint_id=tmp_path)
    with DcpSource(tmp_path) as source:
        assert plain.decode(source.values["s"]).getvalue() == b"abc"


def test_objects_that_are_not_plain_are_named(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(4), "path": Path("p")}}, checkpoint_id=tmp_path)
    with pytest.raises(StateError, match=r"model\.path: is no plain value"):
        DcpSource(tmp_path)
