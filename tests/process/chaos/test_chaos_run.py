"""Ready scenarios hold: struck Holdfast jobs end as the undisturbed ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import etcd
import keeper
import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV
from holdfast.tools.cli import EXIT_USAGE, main


@pytest.fixture
def importing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a job import torch once, not in each of its processes: it takes most of their time."""
    monkeypatch.setenv(PRELOAD_ENV, ",".join(PRELOAD))


def ran(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status = main(["chaos", "run", name, "--out", str(folder), "--json"])
    said = capsys.readouterr()
    if status == EXIT_USAGE and "cannot be made" in said.err:
        pytest.skip(said.err)
    found: dict[str, Any] = json.loads(said.out)
    assert status == 0 and found["held"], found
    checked = set(found["verdict"]["checked"])
    assert {"samples of the reference", "state of the reference"} <= checked
    assert not any(each["missed"] for each in found["struck"]), found["struck"]
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_killed_worker_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("kill-a-rank", tmp_path / "out", capsys)
    (struck,) = found["struck"]
    assert struck["victim"].startswith("trainer/")
    assert found["verdict"]["attempts"] > 1
    assert found["replay"] == "holdfast chaos run kill-a-rank --seed 1"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_node_leaves_after_a_notice_and_a_spare_one_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("preempt-a-node", tmp_path / "out", capsys)
    assert [each["kind"] for each in found["struck"]] == ["preempt", "join"]
    assert found["verdict"]["undone"] == 0
    lines = (tmp_path / "out" / "history" / "events-spare-0.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "worker_started" for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.usefixtures("importing_once")
def test_a_killed_launcher_is_started_again_and_no_protected_step_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("launcher-killed", tmp_path / "out", capsys)
    assert [each["victim"] for each in found["struck"]] == ["the launcher", "the launcher"]
    assert found["verdict"]["attempts"] > 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("importing_once")
def test_a_disk_that_is_full_as_all_memory_is_lost_ends_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("full-disk-at-restore", tmp_path / "out", capsys)
    assert [each["kind"] for each in found["struck"]] == ["disk-full", "lose", "lose"]
    assert found["verdict"]["undone"] > 0, "memory had nothing, so the checkpoint was restored"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_a_managed_etcd_outlives_the_machine_on_which_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        monkeypatch.setenv("HOLDFAST_ETCD", str(etcd.program()))
    except keeper.CannotInstall as error:
        if keeper.required():
            pytest.fail(f"etcd is required here, but {error}", pytrace=False)
        pytest.skip(f"no etcd: {error}")
    found = ran("managed-etcd", tmp_path / "out", capsys)
    assert [each["victim"] for each in found["struck"]] == ["node node0", "launcher of node1"]
    assert found["verdict"]["attempts"] > 1


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "clock-jump",
        "clock-jump-back",
        "coordinator-killed",
        "few-open-files",
        "homeless-user",
        "little-shared-memory",
        "oom-killed-sidecar",
        "read-only-root",
        "sidecar-killed",
        "suspend-a-node",
        "suspend-the-job",
        "tmp-full",
    ],
)
def test_a_poor_machine_or_a_lost_part_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(name, tmp_path / "out", capsys)
