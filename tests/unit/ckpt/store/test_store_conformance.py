"""The stores that need no server, in the suite of all stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore
from store_conformance import StoreConformance

from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.local import LocalStore


class TestLocal(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()
