"""torch.distributed.checkpoint saves to and loads from a real S3 server."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from object_places import S3Place

from holdfast import ckpt
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_address_may_be_a_bucket(s3_environment: S3Place) -> None:
    root = f"{s3_environment.url}/dcp"
    saved = {"w": torch.randn(300, 200), "nested": {"n": 3, "b": torch.ones(3).bfloat16()}}
    found = {"w": torch.zeros(300, 200), "nested": {"n": 0, "b": torch.zeros(3).bfloat16()}}
    writer = HoldfastWriter(root, step=2)
    assert writer.checkpoint_id == f"{root}/step-000000000002"
    dcp.save(saved, storage_writer=writer)
    dcp.load(found, storage_reader=HoldfastReader(writer.checkpoint_id))
    assert torch.equal(found["w"], saved["w"])
    assert torch.equal(found["nested"]["b"], saved["nested"]["b"])
    assert found["nested"]["n"] == 3
    with ckpt.open(root) as opened:
        assert torch.equal(opened["w"][5:7], saved["w"][5:7])
