"""Fixtures of the services, started at first use and shared by all processes of a run.

If a service cannot be installed, its tests skip with the reason; on CI (``CI`` is set) or with
``HOLDFAST_REQUIRE_SERVICES=1`` they fail instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import keeper
import pytest


@contextlib.contextmanager
def service(
    name: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of a service, one for all processes of this run."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a worker of xdist: its parent's is common
        folder = folder.parent
    try:
        with keeper.shared(folder / name, Path(__file__).with_name(f"{name}.py")) as facts:
            yield facts
    except keeper.CannotInstall as error:
        if keeper.required(name):
            pytest.fail(f"{name} is required here, but {error}", pytrace=False)
        pytest.skip(f"no {name}: {error}")


@pytest.fixture(scope="session")
def s3_server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of a Ceph gateway."""
    with service("ceph", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(scope="session")
def emulator(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of an emulator that behaves as AWS does."""
    with service("ministack", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(scope="session")
def azurite(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of Azurite."""
    with service("azurite", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(scope="session")
def google_xml(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of the tests' own server of Google's interface."""
    with service("google_xml", tmp_path_factory, request) as facts:
        yield facts
