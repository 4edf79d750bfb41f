"""Jobs whose workers are forked from a process that imported modules before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from jobs import DEADLINE_S, Job, hurt, job

from holdfast.tools.leftovers import processes_of

LONG = ("--steps", "1000000")
PRELOAD = ("json", "holdfast.elastic.channel.connecting")


def fork_server(running: Job, *, node: str = "n0", besides: int = 0) -> int:
    """Wait for the node's fork server, another one than ``besides``, and return its id."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        found = running.launcher.processes().get(node)
        if found and found.fork_server not in (0, besides):
            return found.fork_server
        time.sleep(0.01)
    raise AssertionError("there is no fork server")


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_workers_are_forked_and_so_is_the_replacement_of_a_killed_one(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, preload=PRELOAD) as running:
        running.await_step(5)
        node = running.launcher.processes()["n0"]
        server = fork_server(running)
        assert parent_of(server) == node.agent
        for pid in node.workers.values():
            assert parent_of(pid) == node.agent
            assert command_of(pid) == command_of(server)
            assert pid in processes_of(running.launcher.run)
        hurt(node.workers["trainer/1"])
        running.world_of(2, generation=2)
        assert command_of(running.worker("trainer/1")) == command_of(server)
        assert running.events("detected")[0]["why"] == "killed by SIGKILL"


def test_a_stopped_or_hung_worker_is_found_as_before(tmp_path: Path) -> None:
    with job(tmp_path, "--hang", "hard", *LONG, preload=PRELOAD, timing={"min_hang_s": 1.5}) as j:
        j.generation(2)
        stack = j.events("stack")[0]
        assert (stack["seat"], stack["how"]) == ("trainer/0", "faulthandler")
        assert "in match" in stack["at"] and "in run_generation" in stack["text"]
        after = len(j.history)
        hurt(j.worker("trainer/1"), signal.SIGSTOP)
        found = j.await_event(
            lambda e: e["kind"] == "detected" and e["victim"] == "trainer/1", after=after
        )
        assert found["what"] == "stopped"


def test_the_job_goes_on_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, preload=PRELOAD) as running:
        running.await_step(5)
        server = fork_server(running)
        before = running.launcher.processes()["n0"].workers
        hurt(server)
        other = fork_server(running, besides=server)
        hurt(before["trainer/1"])  # its replacement starts with the new server or without
        running.world_of(2, generation=2)
        assert running.worker("trainer/0") == before["trainer/0"]
        assert parent_of(other) == running.launcher.processes()["n0"].agent


def test_workers_start_without_a_fork_server_that_always_dies(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with job(tmp_path, preload=("deadly",), env=env) as running:
        assert running.finish().ok


def test_a_module_that_cannot_be_imported_ends_the_job_and_is_named(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, nodes=2, preload=("json", "no_such_module")) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "cannot preload no_such_module: it cannot be imported" in outcome.message
        assert "leave it out of --preload" in outcome.message
        assert running.events("worker_started") == []


def test_a_forked_worker_s_output_goes_to_its_log(tmp_path: Path) -> None:
    (tmp_path / "speaking.py").write_text("print('imported')")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    options = {"capture_output": True, "preload": ("speaking",), "env": env, "max_attempts": 1}
    script = tmp_path / "script.py"
    script.write_text("print('out')\n1 / 0")
    with job(tmp_path, script=script, per_node=1, **options) as running:
        assert not running.finish().ok
    logs = tmp_path / "run" / "logs"
    said = (logs / "trainer-0.log").read_text()
    assert said.startswith("out\nTraceback (most recent call last):\n")
    assert "imported" in (logs / "preload-n0.log").read_text()


def test_a_lost_machine_loses_its_fork_server_too(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, nodes=2, per_node=1, preload=PRELOAD) as running:
        running.await_step(5)
        server = fork_server(running, node="n1")
        assert running.launcher.lose_machine("n1")
        running.world_of(1)
        deadline_s = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{server}").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def counting(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return a file that gets a line at every import of the module ``counted``, and its path."""
    imports = folder / "imports"
    (folder / "counted.py").write_text(
        f"import os\nwith open({str(imports)!r}, 'a') as file: print(os.getpid(), file=file)"
    )
    return imports, {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def test_the_nodes_of_one_launcher_import_once_and_so_does_a_node_that_returns(
    tmp_path: Path,
) -> None:
    imports, env = counting(tmp_path)
    modules = ("counted", *PRELOAD)
    with job(tmp_path, *LONG, nodes=3, per_node=1, preload=modules, env=env) as running:
        running.await_step(5)
        for name, node in running.launcher.processes().items():
            server = fork_server(running, node=name)
            assert parent_of(server) == node.agent
            assert f"{running.launcher.run}/{name} ".encode() in command_of(server)
            for pid in node.workers.values():
                assert (parent_of(pid), command_of(pid)) == (node.agent, command_of(server))
        hurt(running.launcher.processes()["n1"].agent)
        running.world_of(3, generation=2)
        assert parent_of(running.worker("trainer/1")) == running.launcher.processes()["n1"].agent
        assert len(imports.read_text().split()) == 1


def test_a_node_imports_by_itself_when_the_common_server_is_gone(tmp_path: Path) -> None:
    imports, env = counting(tmp_path)
    modules = ("counted", *PRELOAD)
    with job(tmp_path, *LONG, nodes=2, per_node=1, preload=modules, env=env) as running:
        running.await_step(5)
        hurt(int(imports.read_text()))
        hurt(running.launcher.processes()["n1"].agent)
        running.world_of(2, generation=2)
        fork_server(running, node="n1")
        assert len(imports.read_text().split()) == 2
