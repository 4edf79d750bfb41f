"""Tests of the exchange by which gloo forms a group: one read brings the keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import HashStore

from holdfast.ckpt import torch_private
from holdfast.elastic.meeting.exchange import RankExchange
from holdfast.elastic.meeting.point import LOOPBACK


class CountingStore(torch_private.PythonStore):
    """A `HashStore` that notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HashStore()
        self.read: list[list[str]] = []

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.read.append(list(keys))
        return self.inner.multi_get(list(keys))


def test_gloo_reads_the_keys_of_all_ranks_at_once() -> None:
    stores = [CountingStore() for _ in range(3)]
    for store in stores:
        store.inner = stores[0].inner

    def form(rank: int) -> float:
        exchange = RankExchange(stores[rank], rank=rank, size=3)
        limit = timedelta(seconds=60)
        group = torch_private.gloo_group(exchange, rank, 3, host=LOOPBACK, timeout=limit)
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        return float(tensor)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(form, range(3))) == [3.0] * 3
    for store in stores:
        assert len(store.read) == 1, "gloo's keys do not end in the rank any more"
        assert len(store.read[0]) == 3


def test_other_keys_are_read_as_they_are() -> None:
    store = CountingStore()
    exchange = RankExchange(store, rank=1, size=2)
    exchange.set("other", b"a")
    assert exchange.get("other") == b"a"
    exchange.set("x/1", b"b")
    store.set("y/0", "c")
    exchange.wait(["y/0"])
    assert exchange.get("y/0") == b"c"
    store.set("x/0", "d")
    assert [exchange.get("x/0"), exchange.get("x/1")] == [b"d", b"b"]
    assert store.read == [["other"], ["y/0"], ["x/0", "x/1"]]
