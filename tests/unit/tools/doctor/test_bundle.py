"""A bundle has what a report needs, no secret, and a bounded size."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses, Reporter
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import UserEvent
from holdfast.tools.doctor.bundle import LEAST_BYTES, PackedBundle, pack
from holdfast.tools.doctor.facts import PlanFacts
from holdfast.tools.doctor.findings import failure
from holdfast.tools.show.node_status import NodeStatus

PLANTED = [f"s3cr3t-{number:02}-value" for number in range(20)]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run directory with secrets in every place from which a bundle takes text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    secret = iter(PLANTED)
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    RunKey.new().save(folder / "key.json")
    monkeypatch.setenv("WANDB_API_KEY", hidden := next(secret))
    monkeypatch.setenv("HOLDFAST_DB_PASSWORD", next(secret))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://u:{next(secret)}@host/")
    reporter = Reporter(folder, node="n0")
    reporter.emit(UserEvent(name="own", fields={"password": next(secret), "note": hidden}))
    reporter.emit(UserEvent(name="own", fields={"at": f"s3://k:{next(secret)}@b/x?sig=1"}))
    url = f"https://h/x?X-Amz-Signature={next(secret)}"
    reporter.list_processes(
        NodeProcesses(agent=os.getpid(), sidecar=0, data_troubles={"trainer/0": url})
    )
    reporter.close()
    key = json.loads((folder / "key.json").read_text())["server_secret"]
    (folder / "logs" / "trainer-0.log").write_text(
        f"export TOKEN={next(secret)}\nAuthorization: Bearer {next(secret)}\n{key}\nloss 0.5\n"
    )
    (folder / "logs" / "trainer-0.log.1").write_text(f'{{"api_key": "{next(secret)}"}}\n')
    (folder / "logs" / "sidecar-n0.log").write_text(f"--password {next(secret)}\n")
    (folder / "holdfast.toml").write_text(f'[store]\nsecret_key = "{next(secret)}"\n')
    (folder / "link.log").symlink_to(folder / "key.json")
    (folder / "logs" / "linked.log").symlink_to(folder / "key.json")
    return folder


def packed(bundle: Path, run_dir: Path, **options: int) -> PackedBundle:
    secret = PLANTED[-1]
    return pack(
        bundle,
        run_dir,
        findings=[failure("c", f"token={secret}", why="w", remedy="r")],
        nodes=[NodeStatus(node="n0", sidecar=1, status={"persist_error": f"secret: {secret}"})],
        plan=PlanFacts(),
        **options,
    )


def contents(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        return {
            member.name.partition("/")[2]: (archive.extractfile(member) or member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }


def test_a_bundle_has_no_secret_that_was_planted(run_dir: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "report.tar.gz"
    result = packed(bundle, run_dir)
    found = contents(bundle)
    everything = "\n".join([*found, *found.values()])
    assert [secret for secret in PLANTED if secret in everything] == []
    for part in json.loads((run_dir / "key.json").read_text()).values():
        assert part not in everything
    assert {
        "findings.json",
        "statuses.json",
        "versions.json",
        "environment.json",
        "plan.json",
        "stacks.txt",
        "contents.json",
        "run/events-n0.jsonl",
        "run/processes-n0.json",
        "run/logs/trainer-0.log",
        "run/logs/trainer-0.log.1",
        "run/logs/sidecar-n0.log",
        "run/holdfast.toml",
    } == set(found)
    assert "loss 0.5" in found["run/logs/trainer-0.log"]
    assert json.loads(found["contents.json"])["removed"] == result.removed
    assert sum(result.removed.values()) > 10
    assert result.not_inside == ("key.json", "link.log", "logs/linked.log")
    assert f"process {os.getpid()}" in found["stacks.txt"]
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    for name in ("findings.json", "statuses.json", "environment.json", "run/processes-n0.json"):
        json.loads(found[name])
    for line in found["run/events-n0.jsonl"].splitlines():
        json.loads(line)


def test_of_large_files_the_newest_lines_are_packed(run_dir: Path, tmp_path: Path) -> None:
    lines = [f"line {number} password={PLANTED[0]}" for number in range(200_000)]
    for name in ("trainer-1.log", "trainer-2.log"):
        (run_dir / "logs" / name).write_text("\n".join(lines) + "\n")
    bundle = tmp_path / "report.tgz"
    result = packed(bundle, run_dir, most_bytes=LEAST_BYTES)
    assert sum(each.nbytes for each in result.files) <= LEAST_BYTES
    found = contents(bundle)
    for name in ("run/logs/trainer-1.log", "run/logs/trainer-2.log"):
        kept = found[name].splitlines()
        assert len(kept) > 1000
        assert kept[-1].startswith("line 199999 ")
        assert all(line.startswith("line ") for line in kept)
        (entry,) = [each for each in result.files if each.name == name]
        assert entry.left_out_bytes > 0
    assert "loss 0.5" in found["run/logs/trainer-0.log"]
    assert PLANTED[0] not in "".join(found.values())


def test_a_name_that_is_taken_and_wrong_sizes_are_refused(run_dir: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.tar.gz"
    taken.touch()
    with pytest.raises(ConfigError, match="it is there already"):
        packed(taken, run_dir)
    with pytest.raises(ConfigError, match=r"ends in \.tar\.gz"):
        packed(tmp_path / "x.zip", run_dir)
    with pytest.raises(ConfigError, match="or more"):
        packed(tmp_path / "x.tar.gz", run_dir, most_bytes=5)
    with pytest.raises(NotFoundError):
        packed(tmp_path / "x.tar.gz", tmp_path / "none")
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
