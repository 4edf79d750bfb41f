"""Jobs that coordinate through etcd while its members die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etcd import Cluster
from etcd_control import leader_of
from etcd_fixtures import Connect, StartCluster
from etcd_security import Certificates
from forked_scripts import ran
from jobs import PRELOAD, TOY, Job, job, launched
from tree import HELPERS

from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.config import ETCD_TIMING, LaunchConfig, NodeSpec, python_command
from holdfast.elastic.launch.local import Launcher

LONG = ("--steps", "1000000")
TRAINING = HELPERS / "upb_training.py"
STEPS = 40


def _training(directory: Path, *more: str) -> tuple[str, ...]:
    directory.mkdir()
    flags = ("--protobuf", str(directory / "protobuf"), "--result", str(directory / "result"))
    return python_command(TRAINING, [*flags, "--steps", str(STEPS), *more])


def _train(directory: Path, coordinator: str) -> LaunchConfig:
    return LaunchConfig(
        command=_training(directory, "--pace", "0.3", "--until", str(directory / "go")),
        nodes=tuple(NodeSpec(name=f"n{i}", domain=f"n{i}", slots={"trainer": 1}) for i in range(2)),
        wanted={"trainer": 2},
        run_dir=directory / "run",
        coordinator=coordinator,
        timing=ETCD_TIMING,
        preload=PRELOAD,
    )


def _no_keys_of(cluster: Cluster, connect_etcd: Connect) -> bool:
    return connect_etcd(cluster.url).range("")[0] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_is_undisturbed_by_the_death_of_etcd_leaders(
    tmp_path: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(3)
    with launched(_train(tmp_path / "disturbed", cluster.url)) as running:
        running.await_step(3)
        leader = leader_of(cluster)
        leader.kill()
        before = max(int(event["step"]) for event in running.events("step"))
        running.await_step(before + 5)
        os.kill(running.worker("trainer/1"), signal.SIGKILL)  # what needs an agreement
        running.generation(2)
        cluster.start()
        leader_of(cluster).kill()
        (tmp_path / "disturbed" / "go").touch()
        outcome = running.finish()
    assert outcome.ok, outcome.message
    assert _no_keys_of(cluster, connect_etcd), "the run's keys are left behind"
    ran(_training(tmp_path / "undisturbed"), check=True)
    hashes = {
        json.loads((tmp_path / name / "result").read_text())["hash"]
        for name in ("disturbed", "undisturbed")
    }
    assert len(hashes) == 1
    assert (tmp_path / "disturbed" / "protobuf").read_text() == "upb"


def _lose_a_worker(running: Job) -> None:
    seen = len(running.history)
    os.kill(running.worker("trainer/1"), signal.SIGKILL)
    running.world_of(2, after=seen)


def test_a_job_outlives_a_short_absence_of_all_of_etcd(
    tmp_path: Path, start_etcd: StartCluster
) -> None:
    cluster = start_etcd(3)
    options = {"nodes": 2, "per_node": 1, "coordinator": cluster.url}
    with job(tmp_path, *LONG, **options) as running:
        running.await_step(5)
        workers = [running.worker(f"trainer/{i}") for i in range(2)]
        cluster.stop()
        cluster.start()
        running.await_step(max(int(e["step"]) for e in running.events("step")) + 10)
        assert [running.worker(f"trainer/{i}") for i in range(2)] == workers
        _lose_a_worker(running)


def test_nodes_without_etcd_fence_themselves_and_go_on_when_it_is_back(
    tmp_path: Path, start_etcd: StartCluster
) -> None:
    cluster = start_etcd(1)
    timing = {"lease_ttl_s": 2.0, "self_fence_s": 1.5, "keep_alive_s": 0.25}
    options = {"nodes": 2, "per_node": 1, "timing": timing, "coordinator": cluster.url}
    with job(tmp_path, *LONG, **options) as running:
        running.await_step(5)
        number = max(int(e["generation"]) for e in running.events("resumed"))
        before = len(running.history)
        cluster.members[0].signal(signal.SIGSTOP)
        for node in ("n0", "n1"):  # both have ended their workers, by their own clocks
            running.await_event(
                lambda e, n=node: e["kind"] == "worker_exited" and e["node"] == n,
                after=before,
            )
        cluster.members[0].signal(signal.SIGCONT)
        running.generation(number + 1)


def test_the_command_agrees_through_etcd_with_certificates(
    tmp_path: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1, certificates=Certificates.make(tmp_path / "certificates"))
    command = [sys.executable, "-m", "holdfast.tools.cli", "run", "--coordinator", cluster.url]
    script = [str(TOY), "--progress", str(tmp_path / "progress"), "--steps", "5"]
    done = subprocess.run(
        [*command, "--nproc", "2", *script],
        cwd=TOY.parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert connect_etcd(cluster.url).range("")[0] == []


def test_an_etcd_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    config = LaunchConfig(
        command=("true",),
        nodes=(NodeSpec(name="n0", domain="n0", slots={"trainer": 1}),),
        wanted={"trainer": 1},
        run_dir=tmp_path / "run",
        coordinator="etcd://127.0.0.1:1",
    )
    with pytest.raises(CoordinatorError, match="a majority of its members runs"):
        Launcher(config).start()
