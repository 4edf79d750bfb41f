"""The dashboard's server: the stream, one node, the cost of a loss, the page to keep."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from large_run import training, write
from starlette.testclient import TestClient

from holdfast.ckpt.errors import NotFoundError
from holdfast.tools.dashboard.export import render
from holdfast.tools.dashboard.forecast import LossForecast
from holdfast.tools.dashboard.hub import Hub
from holdfast.tools.dashboard.server import MOST_PAGES, Dashboard
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.view import RunView

KNOWN = ("www.w3.org",)
"""The name of SVG's namespace, which nobody loads."""

TOKEN = "a-token-of-enough-characters"


class Told:
    """Losses that cost nothing, but for a node that nobody knows."""

    def together(self, nodes: Sequence[str], view: RunView) -> LossForecast:
        if "unknown" in nodes:
            raise NotFoundError("the run has no node unknown")
        return LossForecast(nodes=tuple(nodes), step=view.step)

    def each(self, nodes: Sequence[str], view: RunView) -> list[LossForecast]:
        return [LossForecast(nodes=(node.node,), step=1) for node in view.nodes]


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    write(tmp_path, training(3, steps=20, lose_every=7))
    hub = Hub(Follower(tmp_path))
    hub.start()
    yield Dashboard(hub, losses=Told(), report=lambda: render(hub.view, [tmp_path]))
    hub.close()


@pytest.fixture
def client(dashboard: Dashboard) -> TestClient:
    return TestClient(
        dashboard.app(token=TOKEN, hosts=()),
        base_url="http://localhost",
        headers={"authorization": f"Bearer {TOKEN}"},
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript"),
     ("/parts.js", "text/javascript"), ("/icon.svg", "image/svg")],
)  # fmt: skip
def test_the_files_of_the_page_are_served(client: TestClient, path: str, kind: str) -> None:
    found = client.get(path)
    assert (found.status_code, found.headers["content-type"][: len(kind)]) == (200, kind)


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/page.css", "/page.js", "/parts.js", "/charts.js", "/dom.js"):
        text = client.get(path).text
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
        assert [name for name in re.findall(r"https?://([^/\"]+)", text) if name not in KNOWN] == []


def test_the_stream_begins_with_all_sections(dashboard: Dashboard) -> None:
    async def first() -> dict[str, str]:
        stream = dashboard._stream()
        try:
            return await anext(stream)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    found: dict[str, Any] = msgspec.json.decode(asyncio.run(first())["data"])
    assert found["head"]["step"] == 20
    assert {"protection", "checkpoints", "recoveries", "messages", "progress"} <= found.keys()
    assert sorted(name for name in found if name.startswith("node/")) == [
        "node/node0", "node/node1", "node/node2"
    ]  # fmt: skip
    assert dashboard._pages == 0


def test_more_pages_than_the_limit_are_sent_away(client: TestClient, dashboard: Dashboard) -> None:
    dashboard._pages = MOST_PAGES
    assert client.get("/events").status_code == 503


def test_a_node_is_told_in_full(client: TestClient) -> None:
    assert client.get("/node?name=node1").json()["seats"][0]["seat"] == "trainer/1"
    assert client.get("/node?name=../etc/passwd").status_code == 404


def test_the_cost_of_a_loss_is_told_or_why_not(client: TestClient) -> None:
    found = client.get("/losses?node=node0&node=node1").json()
    assert (found["nodes"], found["step"]) == (["node0", "node1"], 20)
    assert len(client.get("/losses?each=1").json()) == 3
    assert client.get("/losses?node=unknown").json() == {"error": "the run has no node unknown"}


def test_the_page_to_keep_is_one_file(client: TestClient) -> None:
    text = client.get("/report.html").text
    assert "Recoveries by phase" in text
    assert "<script" not in text
    assert "generation 2" in text
