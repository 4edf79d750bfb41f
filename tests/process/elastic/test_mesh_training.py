"""Every axis of the mesh gives the same samples and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_bodies import Turn, all_ranks

from holdfast.elastic.config import Mesh
from holdfast.elastic.membership.records import MeshSize

CUT = ["sequence", "fsdp_tp"]


def _train(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    """Return the common result of all ranks, and under ``seen`` the samples of each."""
    found = []
    for results in all_ranks(turns, folder):
        seen = [result.pop("seen") for result in results]
        assert all(result == results[0] for result in results)
        found.append({**results[0], "seen": seen})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two ranks: one group of two, and two groups of one."""
    turns: list[Turn] = [
        (MeshSize(tp=2), Mesh(tp=2), CUT, "float32"),
        (MeshSize(dp=2), Mesh(), ["fsdp", "sequence_alone"], "float32"),
    ]
    found = _train(turns, tmp_path_factory.mktemp("two"))
    return dict(zip([*CUT, "fsdp", "sequence_alone"], found, strict=True))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of four ranks: two groups of two, two replicas of two shards, and both at once."""
    turns: list[Turn] = [
        (MeshSize(dp=2, tp=2), Mesh(tp=2), CUT, "float32"),
        (MeshSize(dp=4, shard=2), Mesh(shard=2), ["hsdp", "plain"], "float32"),
        (MeshSize(dp=2, tp=2, shard=2), Mesh(shard=2, tp=2), ["hsdp_tp"], "float32"),
    ]
    found = _train(turns, tmp_path_factory.mktemp("four"))
    return dict(zip([*CUT, "hsdp", "plain", "hsdp_tp"], found, strict=True))


@pytest.mark.parametrize("kind", CUT)
def test_the_number_of_groups_does_not_show_in_a_bit_of_what_they_train(
    kind: str, two: dict[str, Any], four: dict[str, Any]
) -> None:
    one_group, two_groups = dict(two[kind]), dict(four[kind])
    alone, shared = one_group.pop("seen"), two_groups.pop("seen")
    assert one_group == two_groups
    assert alone[0] == alone[1], "the ranks of a group have the same samples"
    assert shared[0] == shared[1] and shared[2] == shared[3]
    assert len(alone[0]) == len(shared[0]) + len(shared[2])


@pytest.mark.parametrize("kind", ["hsdp", "plain", "hsdp_tp"])
def test_replicas_of_shards_train_what_shards_alone_or_whole_models_do(
    kind: str, two: dict[str, Any], four: dict[str, Any]
) -> None:
    reference = two["fsdp_tp"] if kind == "hsdp_tp" else two["fsdp"]
    for what in ("hash", "norms", "losses"):
        assert four[kind][what] == reference[what]


def test_another_number_of_tensor_parallel_ranks_differs_by_rounding_alone(
    two: dict[str, Any],
) -> None:
    cut, whole = two["sequence"], two["sequence_alone"]
    assert cut["hash"] != whole["hash"]
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert cut["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    for name, values in whole["weights"].items():
        assert cut["weights"][name] == pytest.approx(values, abs=1e-5), name
