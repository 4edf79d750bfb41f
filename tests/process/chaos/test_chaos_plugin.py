"""The pytest plug-in: tests that strike a job of toy workers, as pytest runs them for a user."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tree import HELPERS, ROOT

from holdfast.tools.chaos.judging.result import load
from holdfast.tools.chaos.reading import read
from holdfast.tools.leftovers import processes_of

pytestmark = pytest.mark.timeout(300)

PLUGIN = "holdfast.tools.chaos.plugin"
TOY = HELPERS / "toy_worker.py"


def plug_in() -> tuple[str, ...]:
    """Return the words that load it where this installation does not know of it yet."""
    registered = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    return () if registered else ("-p", PLUGIN)


GOOD = f"""
import pytest

def start(cluster):
    cluster.start({str(TOY)!r}, "--steps", "100000", "--progress", "{{folder}}/progress",
                  "--until", "{{folder}}/end")

@pytest.mark.chaos(nodes=2, seed=3)
def test_workers(cluster, nemesis, history):
    start(cluster)
    nemesis.at(step=3).kill("trainer", rank=1)
    nemesis.after("resumed")
    nemesis.at(step=nemesis.step + 3).stop("trainer", lasts_s=0.2)
    nemesis.at(step=nemesis.step + 3)
    (cluster.work / "end").touch()
    assert cluster.wait().ok
    assert list(history.steps) == list(range(1, history.steps[-1] + 1))

@pytest.mark.chaos(nodes={{"a": {{"trainer": 1}}, "b": {{"trainer": 1}}, "c": {{"trainer": 1}}}})
def test_machines(cluster, nemesis, history):
    start(cluster)
    nemesis.at(step=3).lose("b", lasts_s=0.3)
    nemesis.after("resumed").preempt("c", grace_s=5.0)
    nemesis.after("resumed")
    cluster.await_event("node_exited", victim="b")
    (cluster.work / "end").touch()
    history.check()
"""

BAD = f"""
import pytest

LEAKING = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True)"

@pytest.mark.chaos(nodes=1)
def test_leak(cluster):
    cluster.start({sys.executable!r}, "-c", LEAKING + "; import runpy; "
        "sys.argv[1:] = ['--steps', '3', '--progress', '{{folder}}/progress']; "
        "runpy.run_path({str(TOY)!r}, run_name='__main__')")
    cluster.wait()

@pytest.mark.chaos(nodes=1)
def test_unseen_failure(cluster):
    cluster.start({str(TOY)!r}, "--user-error")
    assert not cluster.running.finish().ok

@pytest.mark.chaos(nodes=1)
def test_seen_failure(cluster):
    cluster.start({str(TOY)!r}, "--user-error")
    assert "another model" in cluster.wait(ok=False).message

@pytest.mark.chaos(nodes=1)
def test_nobody_to_hit(cluster, nemesis):
    cluster.start({str(TOY)!r}, "--steps", "100000", "--progress", "{{folder}}/progress")
    nemesis.at(step=1).lose("b")

@pytest.mark.chaos(nodes=1, parities=3)
def test_marker(cluster):
    pass
"""


def outcomes(directory: Path, source: str, *words: str) -> dict[str, str]:
    """Run a file of tests; return the failure of each, "" for none."""
    directory.mkdir()
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    (directory / "test_it.py").write_text(source)
    with (directory / "log").open("wb") as log:
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider"),
                *plug_in(),
                *(f"--rootdir={directory}", f"--basetemp={directory / 'made'}"),
                *(f"--junitxml={directory / 'junit.xml'}", *words, str(directory / "test_it.py")),
            ],
            cwd=directory,
            env={**env, "PYTHONPATH": str(ROOT / "src")},
            stdout=log,
            stderr=log,
            timeout=280,
            check=False,
        )
    assert (directory / "junit.xml").exists(), (directory / "log").read_text()
    found: dict[str, str] = {}
    for case in ElementTree.parse(directory / "junit.xml").iter("testcase"):
        wrong = [each for each in case if each.tag in ("failure", "error")]
        said = "".join((each.get("message") or "") + (each.text or "") for each in wrong)
        found[str(case.get("name"))] = found.get(str(case.get("name")), "") + said
    return found


@pytest.mark.exhaustive
def test_jobs_are_hurt_beside_each_other_and_their_runs_can_be_reported(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "good", GOOD, "-n", "2")
    assert found == {"test_workers": "", "test_machines": ""}
    runs = {run.name.rpartition("::")[2]: run for run in read(tmp_path / "good" / "made")}
    workers, machines = runs["test_workers"], runs["test_machines"]
    assert workers.held and machines.held
    assert workers.seed == 3
    assert "--chaos-seed 3" in workers.replay
    assert [each.kind for each in workers.struck] == ["kill", "stop"]
    assert [each.victim for each in machines.struck] == ["node b", "node c"]
    assert workers.recoveries[0].victim == "trainer/1"
    assert machines.losses[0].nodes == ("b",)
    assert machines.losses[0].outcome != "lost"


def test_what_is_wrong_fails_the_test_that_it_belongs_to(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "bad", BAD)
    assert "the job left something behind" in found["test_leak"]
    assert "sleep 60" in found["test_leak"]
    assert "the job failed" in found["test_unseen_failure"]
    assert found["test_seen_failure"] == ""
    assert "there was no node to hit" in found["test_nobody_to_hit"]
    assert "parities" in found["test_marker"]
    for result in (tmp_path / "bad" / "made").rglob("result.json"):
        run = load(result.parent)
        assert run.held == run.name.endswith("::test_seen_failure"), run
    for pid in processes_of(str(tmp_path / "bad")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # what the leaking test left


def test_the_plug_in_costs_other_tests_nothing() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); "
        "import holdfast.tools.chaos.plugin; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "numpy", "msgspec", "rich", "zmq"}
    assert not heavy & set(done.stdout.split()), done.stdout


def test_a_project_with_tools_of_its_own_has_both(
    tmp_path: Path,
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(cluster):\n    import tools; assert tools.MINE\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *plug_in(), "-c", os.devnull),
            *("--rootdir", str(tmp_path), "--basetemp", str(tmp_path / "made")),
        ],
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if "PYTEST" not in k},
            "PYTHONPATH": str(ROOT / "src"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
