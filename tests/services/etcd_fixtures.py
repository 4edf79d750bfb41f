"""Fixtures of etcd: clusters shared by all tests of a run, and clusters of a single test."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etcd
import keeper
import pytest
from service_fixtures import service

from holdfast.elastic.coordinator.base import Coordinator

StartCluster = Callable[..., etcd.Cluster]
"""Start a cluster of so many members, with the options of `etcd.Cluster`."""

Connect = Callable[..., Coordinator]
"""Connect to an address, with the options of `EtcdCoordinator`."""


@pytest.fixture(scope="session")
def etcd_clusters(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the addresses of a cluster of one member and of one of three; never to be hurt."""
    with service("etcd", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(params=["one", "three"])
def etcd_place(etcd_clusters: keeper.Facts, request: pytest.FixtureRequest) -> str:
    """Return the address of a prefix of this test's own on either cluster."""
    return f"{etcd_clusters[request.param]}/test-{uuid.uuid4().hex}"


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[StartCluster]:
    """Yield a function that starts a cluster for this test to hurt."""
    with contextlib.ExitStack() as stack:

        def start(size: int = 1, **options: Any) -> etcd.Cluster:
            folder = tmp_path / f"etcd-{uuid.uuid4().hex[:8]}"
            try:
                return stack.enter_context(etcd.running(folder, size, **options))
            except keeper.CannotInstall as error:
                if keeper.required():
                    pytest.fail(f"etcd is required here, but {error}", pytrace=False)
                pytest.skip(f"no etcd: {error}")

        yield start


@pytest.fixture
def connect_etcd() -> Iterator[Connect]:
    """Yield a function that connects; the connections are closed at the end."""
    from holdfast.elastic.coordinator.etcd.address import EtcdAddress
    from holdfast.elastic.coordinator.etcd.coordinator import EtcdCoordinator

    with contextlib.ExitStack() as stack:

        def connect(url: str, **options: Any) -> Coordinator:
            coordinator = EtcdCoordinator(EtcdAddress.parse(url), **options)
            stack.callback(coordinator.close)
            return coordinator

        yield connect
