"""Without the etcd client the error names the extra."""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.errors import ConfigError


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
        return find(name, package)

    for module in ("stubs", "link", "stream", "coordinator"):
        monkeypatch.delitem(
            sys.modules, f"holdfast.elastic.coordinator.etcd.{module}", raising=False
        )
    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"grpc is not installed.*install holdfast\[etcd\]"):
        connect("etcd://127.0.0.1:1", RunKey.new())


def test_the_embedded_coordinator_needs_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        assert not name.startswith(("grpc", "aetcd")), name
        return find(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    connect("tcp://127.0.0.1:1", RunKey.new()).close()
