"""Ranks of FSDP2 load the pieces of tensor parallelism through patterns."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from holdfast import ckpt

WORLD_SIZE = 3

ROWS = """
format = 1
[[pattern]]
pieces = "tp{tp}.weight"
whole = "model.weight"
join = [{ over = "tp", as = "fragment", axis = 1 }]
[[pattern]]
pieces = "tp{tp}.bias"
whole = "model.bias"
join = [{ over = "tp", as = "replicate" }]
"""


def together(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    store = dist.FileStore(f"{root}/rendezvous", WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=40)
    )
    model = nn.Linear(8, 7)
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(WORLD_SIZE))))
    with pytest.raises(ckpt.MismatchError, match=r"the replicas tp0\.bias and tp1\.bias differ"):
        before = [each.full_tensor() for each in model.parameters()]
        ckpt.load(f"{root}/odd", {"model": model}, patterns=f"{root}/rows.toml")
    for live, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(live.full_tensor(), old)
    assert ckpt.load(f"{root}/pieces", {"model": model}, patterns=f"{root}/rows.toml").step == 1
    assert torch.equal(model.weight.full_tensor(), torch.arange(56.0).reshape(7, 8))
    assert torch.equal(model.bias.full_tensor(), torch.arange(7.0))
    dist.barrier()
    dist.destroy_process_group()


def test_pieces_are_loaded_into_shards_and_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(ROWS)
    left, right = (half.clone() for half in torch.arange(56.0).reshape(7, 8).chunk(2, 1))
    pieces = {"tp0.weight": left, "tp1.weight": right, "tp0.bias": torch.arange(7.0)}
    ckpt.save(tmp_path / "pieces", pieces | {"tp1.bias": torch.arange(7.0)}, step=1)
    ckpt.save(tmp_path / "odd", pieces | {"tp1.bias": torch.ones(7)}, step=1)
    mp.spawn(together, args=(str(tmp_path),), nprocs=WORLD_SIZE)
