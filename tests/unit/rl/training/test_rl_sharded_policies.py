"""Policies beside the trained one, sharded like it: all of their parts follow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from loss_batches import CONFIG, make_batch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.adapters.rl.loss.divergence import KLConfig
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import Policy, full_tensors, reshard, shard
from holdfast.adapters.rl.training.proximal import Ewma
from holdfast.adapters.rl.training.reference import ReferencePolicy

torch.set_num_threads(1)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *, seed: int) -> Policy:
    policy = build_model(CONFIG.model, seed=seed)
    shard(policy, mesh)
    return policy


@pytest.mark.parametrize("kind", ["mean", "reference"])
def test_after_a_pass_every_parameter_follows_the_policy(mesh: DeviceMesh, kind: str) -> None:
    policy, beside = sharded(mesh, seed=1), sharded(mesh, seed=2)
    batch = make_batch()
    policy(batch.tokens).sum().backward()
    if kind == "mean":
        mean = Ewma(beside, policy, decay=0.0)
        mean.logprobs([batch])
        mean.update()
    else:
        reference = ReferencePolicy(beside, KLConfig(renew_every=1))
        reference.logprobs([batch])
        reference.renew(policy, version=1)
    reshard(policy)
    expected = full_tensors(policy)
    for name, tensor in full_tensors(beside).items():
        torch.testing.assert_close(tensor, expected[name])
