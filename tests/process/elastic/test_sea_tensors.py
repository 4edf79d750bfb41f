"""A sea's payloads and weights do not depend on the mesh of an island in a bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ranks import ranks
from sea_bodies import Way, merge_in_turn

from holdfast.elastic.config import Mesh
from holdfast.elastic.membership.records import MeshSize

ALONE: list[Way] = [(MeshSize(), Mesh(), "plain")]
TWO: list[Way] = [
    (MeshSize(dp=2), Mesh(), "plain"),
    (MeshSize(dp=2), Mesh(), "fsdp"),
    (MeshSize(dp=1, tp=2), Mesh(tp=2), "fsdp_tp"),
]
FOUR: list[Way] = [
    (MeshSize(dp=2, tp=2), Mesh(tp=2), "fsdp_tp"),
    (MeshSize(dp=4, shard=2), Mesh(shard=2), "hsdp"),
    (MeshSize(dp=2, tp=2, shard=2), Mesh(shard=2, tp=2), "hsdp_tp"),
]


def _merged(ways: list[Way], folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks agree on, of each way."""
    folder.mkdir()
    body = functools.partial(merge_in_turn, ways=ways)
    with ranks(ways[0][0].ranks, body, folder, with_world=False) as running:
        first, *others = running.results()
    assert all(other == first for other in others)
    found: list[dict[str, Any]] = first
    return found


def test_payloads_and_merges_are_the_same_on_every_mesh(tmp_path: Path) -> None:
    (alone,) = _merged(ALONE, tmp_path / "alone")
    assert alone["sent"] != alone["kept"]
    for name, ways in {"two": TWO, "four": FOUR}.items():
        for way, found in zip(ways, _merged(ways, tmp_path / name), strict=True):
            assert found == alone, way
