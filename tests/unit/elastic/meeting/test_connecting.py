"""A device's group asks its store while it connects, and never again."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import PrefixStore
from holdfast.elastic.meeting.connecting import ConnectingStore


def test_a_store_serves_until_the_ranks_are_connected_and_then_answers_at_once() -> None:
    inner = HashStore()
    inner.set_timeout(timedelta(seconds=300))
    store = ConnectingStore(PrefixStore("group", inner))
    torchs = PrefixStore("nccl", store)  # as torch calls it, from C++
    torchs.set("0", "identity")
    assert torchs.get("0") == b"identity"
    assert torchs.multi_get(["0", "0"]) == [b"identity", b"identity"]
    torchs.multi_set(["1"], ["one"])
    torchs.wait(["0", "1"], timedelta(seconds=1))
    assert torchs.add("count", 2) == 2
    assert torchs.check(["0"])
    assert inner.get("group/nccl/0") == b"identity"

    store.leave()
    torchs.set("exception_dump", "3")
    assert not torchs.check(["exception_dump"])
    assert not inner.check(["group/nccl/exception_dump"])
    with pytest.raises(PeerError, match="its store is not asked again"):
        torchs.get("0")
