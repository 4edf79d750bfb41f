"""The peer of resharded loads: torch.distributed.checkpoint on the same shards, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.adapters.dcp.sink import DcpSink
from holdfast.ckpt import TensorShard
from holdfast.ckpt.geometry.layout import Box, TensorSpec

Parts = Mapping[str, TensorShard]
"""The shards that one rank holds, by the name of their tensor."""


def save_parts(ranks: Sequence[Parts], path: Path) -> None:
    """Write float32 shards as torch's checkpoint, in about as many files as ``ranks``."""
    specs = {
        name: TensorSpec(fqn=name, dtype="float32", shape=part.shape)
        for name, part in ranks[0].items()
    }
    with DcpSink(path, file_bytes=max(_nbytes(ranks[0]), 1)) as sink:
        sink.begin(specs, aliases={}, values={}, step=None)
        for parts in ranks:
            for name, part in parts.items():
                box = Box(offset=part.offset, shape=tuple(part.tensor.shape))
                sink.write(name, box, memoryview(part.tensor.numpy().tobytes()))
        sink.finish()


def _nbytes(parts: Parts) -> int:
    return sum(part.tensor.nbytes for part in parts.values())


def load_parts(parts: Parts, path: Path) -> None:
    """Load the shards of one rank in place, by torch's reader and its resharding."""
    state: dict[str, Any] = {name: part.tensor for name, part in parts.items()}
    load(state, checkpoint_id=path, planner=_ShardPlanner(parts), no_dist=True)


class _ShardPlanner(DefaultLoadPlanner):
    """Plans as torch does for DTensors, whose process group there is no need of here."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        assert self.metadata is not None
        for name, part in self._parts.items():
            found = cast("TensorStorageMetadata", self.metadata.state_dict_metadata[name])
            chunk = ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=part.tensor.size())
            items += create_read_items_for_chunk_list(name, found, [chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._parts[read_item.dest_index.fqn].tensor
        pairs = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (at, length) in enumerate(pairs):
            tensor = tensor.narrow(dim, at, length)
        return tensor
