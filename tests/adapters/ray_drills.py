"""Jobs of ``holdfast ray submit`` on a small Ray cluster whose nodes are drained, killed and added.

    python ray_drills.py DRILL FOLDER SCRIPT [ETCD]    runs one drill; prints the report as JSON

Every raylet has a loopback address of its own and one CPU, so it stands for a machine. The script
is the training that waits in one step until the drill is over; that of the first drill has steps
that are slow until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray.core.generated.autoscaler_pb2 as autoscaler
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

DEADLINE_S = 240.0
STORE_BYTES = 80 << 20
DRAIN_S = 60
STEPS = 1000


class Drill:
    """A cluster, a job that was submitted to it, and the lines that its workers told."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.script = folder, script
        self.log, self.end = folder / "log.jsonl", folder / "end"
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._added = 1
        self.job: subprocess.Popen[bytes] | None = None

    def add(self, cpus: int = 1) -> Any:
        """Add a node; return it."""
        self._added += 1
        return self.cluster.add_node(
            node_ip_address=f"127.0.0.{self._added}",
            num_cpus=cpus,
            object_store_memory=STORE_BYTES,
        )

    def submit(self, *options: str, script: tuple[str, ...] = ()) -> None:
        """Start ``holdfast ray submit``."""
        words = [sys.executable, "-m", "holdfast.tools.cli", "ray", "submit"]
        words += ["--address", self.cluster.address, *options]
        words += [
            "--env",
            f"HOLDFAST_TEST_LOG={self.log}",
            "--env",
            f"HOLDFAST_TEST_END={self.end}",
        ]
        with (self.folder / "submit.log").open("wb") as output:
            self.job = subprocess.Popen(
                [*words, *(script or (self.script,))],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return what the workers told so far."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_bytes().splitlines()]

    def await_world(self, world: int, *, after: int = 0) -> int:
        """Wait until so many ranks wait in their step together; return the number of lines."""

        def there() -> bool:
            found = [line for line in self.lines()[after:] if "waits" in line]
            return len([line for line in found if line["world"] == world]) >= world

        self.wait_for(there, f"{world} ranks that wait")
        return len(self.lines())

    def wait_for(self, there: Callable[[], object], what: str) -> None:
        """Wait for a condition; raise ``AssertionError`` with all that is known without it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not there():
            if time.monotonic() > deadline_s or (self.job and self.job.poll() is not None):
                raise AssertionError(f"no {what}: {self.lines()}\n{self.output()}")
            time.sleep(0.05)

    def output(self) -> str:
        """Return what the command printed."""
        return (self.folder / "submit.log").read_text(errors="replace")

    def await_end(self) -> int:
        """Return the exit status of the command."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.lines()}\n{self.output()}") from None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the command."""
        assert self.job is not None
        return self.job

    def told(self) -> dict[str, Any]:
        """Return the weights and the steps at which generations began, as the workers told."""
        return {
            "done": [line["weights"] for line in self.lines() if "done" in line],
            "begins": [line["begins"] for line in self.lines() if "begins" in line],
            "output": self.output(),
        }

    def left(self, pids: list[int] | None = None) -> list[str]:
        """Return the commands that are left of the job once its end had time to be heard of."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = [command for command in map(self._of_job, processes()) if command]
            found += [f"process {pid}" for pid in pids or [] if lives(pid)]
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(0.1)

    def is_of_job(self, pid: int) -> bool:
        """Say whether a process has the job's variables."""
        return bool(self._of_job(pid))

    def _of_job(self, pid: int) -> str:
        """Return the command of a process that has the job's variables, else nothing."""
        with contextlib.suppress(OSError):
            if str(self.log).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return ""

    def drain(self, node: Any) -> None:
        """Have Ray drain a node, as for a machine that the cloud takes away."""
        reason = autoscaler.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + DRAIN_S) * 1000)
        done, why = GcsClient(address=self.cluster.address).drain_node(
            node.node_id, reason, "taken away", deadline_ms
        )
        assert done, why

    def lose(self, node: Any, *, all_of_it: bool) -> list[int]:
        """SIGKILL a raylet, or everything on its machine; return the processes it had."""
        (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
        pids = below(raylet.process.pid)
        for pid in pids if all_of_it else pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raylet.process.wait()  # Ray's workers take one that was not waited for as alive
        return pids

    def close(self) -> None:
        """End the job and the cluster."""
        if self.job is not None and self.job.poll() is None:
            self.job.kill()
            self.job.wait()
        self.cluster.shutdown()


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def below(pid: int) -> list[int]:
    """Return a process and all those it started, the first one first."""
    found, following = [], [pid]
    while following:
        each = following.pop(0)
        found.append(each)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                following += map(int, (task / "children").read_text().split())
    return found


def lives(pid: int) -> bool:
    """Say whether a process runs; one that ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextmanager
def drill(folder: Path, script: str) -> Iterator[Drill]:
    made = Drill(folder, script)
    try:
        yield made
    finally:
        made.close()


def drained_and_killed(folder: Path, script: str) -> dict[str, Any]:
    """A node is drained and ends, two are lost, and new ones take their places."""
    result, runs = folder / "result.json", folder / "runs"
    with drill(folder, script) as run:
        first, second = run.add(), run.add()
        words = ("--result", str(result), "--steps", str(STEPS), "--pace", "0.2")
        run.submit(
            *("--nodes", "2:3", "--run-dir", str(runs)),
            script=(script, *words, "--until", str(run.end)),
        )
        trains = Progress(run, runs)
        trains.on(2)
        third = run.add()
        trains.on(3)
        run.drain(third)
        run.wait_for(lambda: events(runs, "node_exited"), "node that leaves")
        trains.on(2)
        ended = run.lose(third, all_of_it=True)
        run.add()
        trains.on(3)
        ended += run.lose(first, all_of_it=False)
        trains.on(2)
        run.add()
        trains.on(3)
        ended += run.lose(second, all_of_it=True)
        trains.on(2)
        run.add()
        trains.on(3)
        run.end.touch()
        status = run.await_end()
        return {
            "status": status,
            "result": json.loads(result.read_text()) if status == 0 else None,
            "output": run.output(),
            "handed_over": [event["step"] for event in events(runs, "handed_over")],
            "restored": [event["restore_step"] for event in events(runs, "proposed")],
            "exits": [each["status"] for each in events(runs, "node_exited")],
            "left": run.left() + [f"process {pid}" for pid in ended if lives(pid)],
        }


class Progress:
    """Waits for the ranks of a job that trains all the time, by the events of all its nodes."""

    def __init__(self, run: Drill, runs: Path) -> None:
        self._run, self._runs = run, runs
        self._generation = 0

    def on(self, world: int) -> None:
        """Wait until a later generation of so many ranks has completed a step."""

        def there() -> bool:
            formed = {
                event["generation"]
                for event in events(self._runs, "proposed")
                if len(event["ranks"]) == world and event["generation"] > self._generation
            }
            stepped = {event["generation"] for event in events(self._runs, "step")} & formed
            self._generation = max(stepped, default=self._generation)
            return bool(stepped)

        self._run.wait_for(there, f"step of {world} ranks after generation {self._generation}")


def other_ends(folder: Path, script: str) -> dict[str, Any]:
    """Jobs that have no script, that fail, that are stopped and killed."""
    fails = folder / "fails.py"
    fails.write_text("print('about to fail')\nraise SystemExit(3)\n")
    with drill(folder, script) as run:
        run.add()
        run.add()
        report: dict[str, Any] = {}
        run.submit("--nodes", "2", script=("absent.py",))
        report["absent"] = [run.await_end(), run.output()]

        run.submit("--nodes", "2", script=(str(fails),))
        report["failed"] = [run.await_end(), run.output()]

        run.submit("--nodes", "2")
        run.await_world(2)
        run.process.send_signal(signal.SIGTERM)
        report["stopped"] = [run.await_end(), run.left()]

        seen = len(run.lines())
        run.submit("--nodes", "2")
        run.await_world(2, after=seen)
        pids = below(run.process.pid)
        run.process.kill()
        run.process.wait()
        report["killed"] = run.left(pids)
        return report


def parts_killed(folder: Path, script: str) -> dict[str, Any]:
    """An actor, the process of the coordinator and Ray's GCS are killed, one after the other."""
    with drill(folder, script) as run:
        run.add()
        run.add()
        run.submit("--nodes", "2")
        seen = run.await_world(2)
        (coordinator,) = (pid for pid in below(run.process.pid) if is_coordinator(pid))
        os.kill(actor_on(run), signal.SIGKILL)
        seen = run.await_world(2, after=seen)
        os.kill(coordinator, signal.SIGKILL)
        run.wait_for(
            lambda: any(
                is_coordinator(pid) for pid in below(run.process.pid) if pid != coordinator
            ),
            "coordinator",
        )
        run.cluster.head_node.kill_gcs_server()
        run.cluster.head_node.start_gcs_server()
        run.end.touch()
        return {"status": run.await_end(), **run.told(), "left": run.left()}


def one_wide_node(folder: Path, script: str) -> dict[str, Any]:
    """A node with room for all takes part once; the next part waits for another node."""
    with drill(folder, script) as run:
        run.add(cpus=3)
        run.submit("--nodes", "1:2", "--run-dir", str(folder / "runs"))
        seen = run.await_world(1)
        run.add()
        run.await_world(2, after=seen)
        run.end.touch()
        status = run.await_end()
        joined = events(folder / "runs", "job_started")
        return {
            "status": status,
            **run.told(),
            "nodes": sorted(path.name for path in (folder / "runs").iterdir()),
            "parts": len(joined),
        }


def with_etcd(folder: Path, script: str, url: str) -> dict[str, Any]:
    """The nodes meet at an etcd; the one that was first is lost."""
    with drill(folder, script) as run:
        first = run.add()
        run.add()
        run.submit("--nodes", "2", "--coordinator", url)
        seen = run.await_world(2)
        run.lose(first, all_of_it=True)
        run.await_world(1, after=seen)
        run.end.touch()
        return {"status": run.await_end(), **run.told(), "left": run.left()}


def without_holdfast(folder: Path, script: str) -> dict[str, Any]:
    """Ray's nodes have no Holdfast."""
    before = os.environ.pop("PYTHONPATH")
    with drill(folder, script) as run:
        run.add()
        os.environ["PYTHONPATH"] = before
        run.submit("--nodes", "1")
        return {"status": run.await_end(), "said": run.output(), "left": run.left()}


def head_lost(folder: Path, script: str) -> dict[str, Any]:
    """Ray's control service ends for good, as with its machine."""
    with drill(folder, script) as run:
        run.add()
        run.add()
        run.submit("--nodes", "2")
        run.await_world(2)
        pids = below(run.process.pid)
        run.cluster.head_node.kill_gcs_server()
        return {"status": run.await_end(), "left": run.left(pids), "said": run.output()}


def guide(folder: Path, script: str) -> dict[str, Any]:
    """The scripts of the guide, as a user runs them."""
    with drill(folder, script) as run:
        run.add()
        run.add()
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, "RAY_ADDRESS": run.cluster.address},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return {"status": done.returncode, "said": done.stdout, "erred": done.stderr}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind that all nodes wrote."""
    mark = f'"kind":"{kind}"'
    lines = [line for path in folder.rglob("events-*.jsonl") for line in path.open()]
    found = [json.loads(line) for line in lines if mark in line and line.endswith("\n")]
    return sorted(found, key=lambda event: float(event["time_s"]))


def actor_on(run: Drill) -> int:
    """Return the process of Ray that has the part of a node."""
    for pid in processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "holdfast.tools.cli" in words and "run" in words and run.is_of_job(pid):
                return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError(f"no part of the job runs: {run.output()}")


def is_coordinator(pid: int) -> bool:
    """Say whether a process is a job's coordinator."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"holdfast.elastic.coordinator" in words and lives(pid)
    return False


DRILLS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (
        drained_and_killed,
        other_ends,
        parts_killed,
        one_wide_node,
        with_etcd,
        without_holdfast,
        head_lost,
        guide,
    )
}


def main() -> None:
    """Run the drill of the command line."""
    name, folder, script, *more = sys.argv[1:]
    report = DRILLS[name](Path(folder), script, *more)
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
