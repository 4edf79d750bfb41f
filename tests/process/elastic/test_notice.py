"""A node with a termination notice leaves at the next step, and no step is lost."""

from __future__ import annotations

import http.server
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_scripts import ran
from jobs import PATIENT, PRELOAD, Job, hurt, launched
from tree import HELPERS

from holdfast.elastic.agent.notice import NoticeConfig, ask
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "tiny_training.py"
STEPS = 40


class Training(Job):
    """A job whose steps are slow until the test says otherwise: a notice finds it at work."""

    def __init__(self, running: Job, go_on: Path) -> None:
        super().__init__(running.launcher)
        self._go_on = go_on

    def await_departure(self, *nodes: str) -> None:
        """Wait until these nodes have left; the others finish the rest of the work at once."""
        for node in nodes:
            self.await_event(lambda e, n=node: e["kind"] == "node_exited" and e["victim"] == n)
        self._go_on.touch()


@contextmanager
def training(
    directory: Path, *args: str, nodes: int = 3, file: Path | None = None
) -> Iterator[Training]:
    go_on = directory / "go"
    flags = ["--result", str(directory / "result.json"), "--steps", str(STEPS)]
    flags += ["--pace", "0.4", "--until", str(go_on)]
    config = LaunchConfig(
        command=python_command(SCRIPT, [*flags, *args]),
        nodes=tuple(
            NodeSpec(name=f"n{i}", domain=f"n{i}", slots={"trainer": 1}) for i in range(nodes)
        ),
        wanted={"trainer": nodes},
        run_dir=directory / "run",
        timing=PATIENT,
        preload=PRELOAD,
        notice=NoticeConfig(file=f"{file}-{{node}}" if file else "", every_s=0.05),
    )
    with launched(config) as running:
        yield Training(running, go_on)


def result_of(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The weights of the same steps on one rank that nothing disturbs."""
    directory = tmp_path_factory.mktemp("calm")
    flags = ["--result", str(directory / "result.json"), "--steps", str(STEPS)]
    ran([sys.executable, SCRIPT, *flags], check=True)
    return result_of(directory)["hash"]


def steps_of(running: Job, seat: str) -> list[int]:
    return [event["step"] for event in running.events("step") if event["seat"] == seat]


def test_a_node_with_a_notice_hands_over_and_no_step_is_done_twice(
    tmp_path: Path, undisturbed: object
) -> None:
    with training(tmp_path) as running:
        running.await_step(4)
        hurt(running.launcher.processes()["n1"].agent, signal.SIGTERM)
        running.await_departure("n1")
        assert running.finish().ok
        handed = running.events("handed_over")
        assert [event["seat"] for event in handed] == ["trainer/1"]
        assert running.events("proposed")[1]["restore_step"] == handed[0]["step"]
        assert steps_of(running, "trainer/0") == list(range(1, STEPS + 1))
        assert running.events("node_exited")[0]["status"] == "left after a notice"
        assert "n1" not in running.launcher.processes()
        assert running.events("detected")[0]["why"] == "SIGTERM"
    assert result_of(tmp_path)["hash"] == undisturbed


def test_two_nodes_leave_one_after_the_other(tmp_path: Path, undisturbed: object) -> None:
    file = tmp_path / "preempted"
    with training(tmp_path, file=file) as running:
        running.await_step(4)
        for node in ("n2", "n1"):
            Path(f"{file}-{node}").touch()
        running.await_departure("n1", "n2")
        assert running.finish().ok
        first, second = running.events("handed_over")
        assert {first["seat"], second["seat"]} == {"trainer/1", "trainer/2"}
        assert first["generation"] < second["generation"]
        assert steps_of(running, "trainer/0") == list(range(1, STEPS + 1))
        assert len(running.events("worker_started")) == 3, "those that stay are not restarted"
    assert result_of(tmp_path)["hash"] == undisturbed


def test_without_parity_the_store_takes_the_step(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with training(tmp_path, "--parity", "0", "--checkpoint", store, nodes=2) as running:
        running.await_step(4)
        hurt(running.launcher.processes()["n1"].agent, signal.SIGTERM)
        running.await_departure("n1")
        assert running.finish().ok
        assert steps_of(running, "trainer/0") == list(range(1, STEPS + 1))


class _Cloud(http.server.BaseHTTPRequestHandler):
    said: tuple[int, bytes] = (404, b"")

    def do_GET(self) -> None:
        status, body = self.said
        self.send_response(status if self.headers["Metadata-Flavor"] == "Google" else 403)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("status", "body", "notice"),
    [
        (404, b"not found", ""),
        (200, b"FALSE", ""),
        (200, b"", ""),
        (200, b"TRUE", "TRUE"),
        (200, b'{"action": "terminate"}', '{"action": "terminate"}'),
    ],
)
def test_a_clouds_answer_is_understood(status: int, body: bytes, notice: str) -> None:
    handler = type("Handler", (_Cloud,), {"said": (status, body)})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/preempted"
    assert ask(url, headers={"Metadata-Flavor": "Google"}) == notice
    thread.join()
    server.server_close()
    assert ask(url, headers={}) == "", "nobody answers there now"
