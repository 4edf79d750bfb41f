"""Ranks of torch.distributed save and load together: one checkpoint, one fate."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps

WORLD_SIZE = 3


def build(seed: int, *, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Seven and five rows over three ranks, and one row: uneven, and empty at the last."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 1))
    if mesh:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "seed": seed}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = state["model"].state_dict()
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in found.items()
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def together(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    store = dist.FileStore(f"{root}/rendezvous", WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=40)
    )
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE)))
    home = Path(root, "home")
    saved = build(1, mesh=mesh)
    path = Path(ckpt.save(home, saved, step=1))
    assert path == home / "step-000000000001"
    assert len(list((path / "data").iterdir())) == WORLD_SIZE
    other = build(2, mesh=mesh)
    assert ckpt.load(home, other).step == 1
    assert equal(whole(other), whole(saved))
    assert other["seed"] == 1

    with pytest.raises(ckpt.NotFoundError, match="step 9; steps there: 1"):
        ckpt.load(home, other, step=9)
    bad = build(3, mesh=mesh) | ({"bad": object()} if rank == 1 else {})
    with pytest.raises(ckpt.StateError, match="bad: cannot capture"):
        ckpt.save(home, bad, step=2)
    with pytest.raises(ckpt.ArgumentError, match=r"different steps \[2, 3, 4\]"):
        ckpt.save(home, saved, step=2 + rank)
    with pytest.raises(ckpt.ArgumentError, match="strict is 'exactly'"):
        ckpt.load(home, other, strict="exactly" if rank == 1 else "exact")  # type: ignore[arg-type]
    with pytest.raises(ckpt.ArgumentError, match=r"step is 2\.5"):
        ckpt.save(home, saved, step=2.5 if rank == 1 else 2)  # type: ignore[arg-type]
    if rank == 1:
        broken = home.parent / "file"
        broken.write_text("a file")
    with pytest.raises(ckpt.StoreError, match="is a file"):
        ckpt.save(home.parent / "file" if rank == 1 else home, saved, step=2)
    assert committed_steps(home) == [1]

    ckpt.save(home, build(4, mesh=mesh), step=4)
    dist.barrier()
    if rank == 2:
        damage(next((home / "step-000000000004/data").glob("00002-*")))
    dist.barrier()
    assert ckpt.load(home, other).step == 1
    assert equal(whole(other), whole(saved))
    with pytest.raises(ckpt.CorruptError, match="00002-g0"):
        ckpt.load(home, other, step=4)
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_share_one_checkpoint_and_one_fate(tmp_path: Path) -> None:
    mp.spawn(together, args=(str(tmp_path),), nprocs=WORLD_SIZE)
    alone = build(7)
    report = ckpt.load(tmp_path / "home", alone, step=1)
    assert report.step == 1
    assert equal(whole(alone), whole(build(1)))
    again = Path(ckpt.save(tmp_path / "alone", alone, step=1))
    with ckpt.open(tmp_path / "home", step=1) as sharded, ckpt.open(again) as single:
        assert sorted(sharded.keys()) == sorted(single.keys())
        for fqn in sharded.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(sharded[fqn][...], single[fqn][...])
