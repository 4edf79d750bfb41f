"""The fixtures of restores: real sidecars, and ranks that open ahead or do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from restoring_ranks import NODES, Ranks
from sidecar_group import SidecarGroup, sidecar_group


@pytest.fixture(params=[False, True], ids=["", "opened ahead"])
def opened_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "ahead", request.param)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        yield group
