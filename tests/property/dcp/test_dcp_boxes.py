"""DCP over our format restores a tensor whole, for any division among the items of a plan."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast import ckpt
from holdfast.adapters.dcp import DcpSink, DcpSource, HoldfastReader, HoldfastWriter
from holdfast.ckpt.geometry.layout import Box, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Cuts = list[list[int]]


def boxes_of(shape: tuple[int, ...], cuts: Cuts) -> list[Box]:
    """The boxes between the cuts of each dim."""
    spans = []
    for extent, inner in zip(shape, cuts, strict=True):
        edges = [0, *inner, extent]
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    return [
        Box(offset=tuple(o for o, _ in corner), shape=tuple(n for _, n in corner))
        for corner in product(*spans)
    ]


class Cutting(DefaultSavePlanner):
    """Plans every tensor as several boxes."""

    def __init__(self, boxes: list[Box]) -> None:
        super().__init__()
        self._boxes = boxes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(
            plan, items=[self._part(item, box) for item in plan.items for box in self._boxes]
        )

    def _part(self, item: WriteItem, box: Box) -> WriteItem:
        assert item.tensor_data is not None
        offset, shape = torch.Size(box.offset), torch.Size(box.shape)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=shape),
            properties=item.tensor_data.properties,
            size=item.tensor_data.size,
        )
        index = MetadataIndex(item.index.fqn, offset)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes))
        return self.state_dict[write_item.index.fqn][box.slices]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Cuts]:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    cuts = [
        sorted(draw(st.sets(st.integers(1, extent - 1), max_size=2))) if extent > 1 else []
        for extent in shape
    ]
    return shape, cuts


@settings(max_examples=examples(20), deadline=None)
@given(cut=cut_tensors(), data=st.data())
def test_any_cut_loads_whole_and_in_part(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[tuple[int, ...], Cuts],
    data: st.DataObject,
) -> None:
    root = tmp_path_factory.mktemp("cut")
    shape, cuts = cut
    boxes = data.draw(st.permutations(boxes_of(shape, cuts)))
    saved = {"w": torch.randn(shape), "v": torch.randn(shape).to(torch.bfloat16)}
    writer = HoldfastWriter(root / "ours", step=1)
    dcp.save(saved, storage_writer=writer, planner=Cutting(boxes))
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(found, storage_reader=HoldfastReader(root / "ours"))
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    with ckpt.open(root / "ours") as opened:
        assert all(torch.equal(opened[name][...], saved[name]) for name in saved)
    through_directory(root / "theirs", saved["w"], boxes)


def through_directory(path: Path, tensor: torch.Tensor, boxes: list[Box]) -> None:
    """Pour the boxes into a directory of DCP; read it whole with DCP, by boxes with ours."""
    spec = TensorSpec(fqn="w", dtype="float32", shape=tuple(tensor.shape))
    with DcpSink(path, file_bytes=200) as sink:
        sink.begin({"w": spec}, aliases={}, values={}, step=None)
        for box in boxes:
            sink.write("w", box, memoryview(tensor[box.slices].numpy().tobytes()))
        sink.finish()
    found = {"w": torch.zeros_like(tensor)}
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["w"], tensor)
    with DcpSource(path) as source:
        for box in boxes:
            bigger = grown(box)
            data = bytes(source.read("w", bigger))
            assert data == tensor[bigger.slices].numpy().tobytes(), bigger


def grown(box: Box) -> Box:
    """The box with one more element before it along each dim, where there is one."""
    pairs = list(zip(box.offset, box.shape, strict=True))
    return Box(
        offset=tuple(max(o - 1, 0) for o, _ in pairs),
        shape=tuple(n + (o > 0) for o, n in pairs),
    )
