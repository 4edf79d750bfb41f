"""The dashboard in a real browser: a job that is hurt, a server that restarts, many nodes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromium
import keeper
import msgspec
import pytest
from jobs import DEADLINE_S, hurt, launched, trainers
from large_run import BEGIN_S, training, write
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tree import ROOT

from holdfast.elastic.events import Detected, Event, JobEnded

TINY = ROOT / "tests" / "process" / "helpers" / "tiny_training.py"
HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    try:
        chromium.programs()
    except keeper.CannotInstall as error:
        if keeper.required("chromium"):
            pytest.fail(f"a browser is required here, but {error}", pytrace=False)
        pytest.skip(f"no browser: {error}")
    with chromium.browser() as found:
        yield found


@pytest.fixture
def page(browser: Chrome) -> Iterator[Chrome]:
    yield browser
    browser.get("about:blank")
    browser.get_log("browser")  # a page whose server ended tried to connect again


@contextlib.contextmanager
def dashboard(run_dir: Path, *words: str) -> Iterator[str]:
    """Serve a run; yield the address that the command prints."""
    command = [sys.executable, "-m", "holdfast.tools.cli", "dashboard", str(run_dir)]
    token = ("--token-file", str(run_dir.parent / "token"))
    process = subprocess.Popen(
        [*command, *token, *(words or ("--port", "0"))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(f"dashboard of {run_dir}: http://127.0.0.1:"), line
        yield line.rpartition(": ")[2].strip()
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 143


def until(look: Callable[[], Any], what: str) -> Any:
    """Return the first true answer."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not seen: {what}")


def text(page: Chrome, place: str) -> str:
    found: str = page.execute_script(f"return document.getElementById('{place}').innerText")
    return found


def steps_shown(page: Chrome) -> int:
    found = re.search(r"Steps complete\s+([\d,]+)", text(page, "figures"))
    return int(found[1].replace(",", "")) if found else -1


def errors(page: Chrome) -> list[str]:
    """Return what the console tells of errors since the last call."""
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def job_args(tmp_path: Path) -> tuple[object, ...]:
    ends = ("--pace", "0.1", "--until", tmp_path / "end", "--steps", "100000")
    saves = ("--checkpoint", tmp_path / "ck", "--checkpoint-every", "20")
    return (*ends, *saves, "--result", tmp_path / "result")


def test_a_job_that_is_hurt_is_watched_and_the_server_may_restart(
    page: Chrome, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = trainers(TINY, job_args(tmp_path), run_dir=run_dir, nodes=3)
    with launched(config) as running:
        running.await_step(5)
        with dashboard(run_dir) as address:
            page.get(address)
            until(lambda: steps_shown(page) >= 5, "steps")
            assert "#" not in page.current_url
            before = steps_shown(page)
            until(lambda: steps_shown(page) > before, "more steps, live")
            until(lambda: "Any one node may die now" in text(page, "losses"), "what may die")
            hurt(running.worker("trainer/1"))
            until(lambda: "lost: trainer/1" in text(page, "recoveries"), "the recovery")
            until(lambda: "trainer/1 was killed by SIGKILL" in text(page, "messages"), "why")
            until(lambda: text(page, "state") == "training", "training goes on")
            assert "generation 2" in page.execute_script(
                "return document.querySelector('#recoveries details p').textContent"
            )
            running.world_of(3, generation=2)  # the worker is back
            for node in page.find_elements(By.CSS_SELECTOR, ".node")[:2]:
                node.click()
            until(lambda: "would be lost" in text(page, "losses"), "the cost of two nodes")
            until(lambda: "durable" in text(page, "checkpoints"), "a durable checkpoint")
            assert errors(page) == []
            port = address.partition("#")[0].rpartition(":")[2].strip("/")
        until(lambda: "connecting again" in text(page, "link"), "the server is away")
        with dashboard(run_dir, "--port", port):
            before = steps_shown(page)
            until(lambda: text(page, "link") == "live", "the page is connected again")
            until(lambda: steps_shown(page) > before, "more steps")
            page.refresh()
            until(lambda: text(page, "link") == "live", "the token stays in this tab")
            refused = [each for each in errors(page) if "ERR_CONNECTION_REFUSED" not in each]
            assert [each for each in refused if "ERR_INCOMPLETE_CHUNKED" not in each] == []
    assert running.events("job_ended")


def test_a_thousand_nodes_fit_on_a_page(page: Chrome, tmp_path: Path) -> None:
    lost = [
        Detected(
            what="node_lost",
            victim=f"node{number}",
            node="node0",
            source="agent",
            time_s=BEGIN_S + 900,
        )
        for number in (17, 420)
    ]
    events = [*training(1000, steps=300, ranks=4, lose_every=100), *lost]
    write(tmp_path / "run", iter(events))
    with dashboard(tmp_path / "run") as address:
        page.get(address)
        until(lambda: len(page.find_elements(By.CSS_SELECTOR, ".node")) == 1000, "all nodes")
        until(lambda: "lost 2" in text(page, "states"), "the lost ones")
        first = page.find_element(By.CSS_SELECTOR, ".node[tabindex='0']")
        first.send_keys(Keys.ARROW_RIGHT)
        page.switch_to.active_element.send_keys(Keys.ENTER)
        until(lambda: "node1: training" in text(page, "node"), "the node, by keyboard")
        page.find_element(By.ID, "as-table").click()
        until(
            lambda: (
                page.execute_script(
                    "return document.querySelectorAll('#nodes-table tbody tr').length"
                )
                == 1000
            ),
            "the table",
        )
        used = page.execute_script("return performance.memory.usedJSHeapSize")
        assert used < 64 << 20
        assert errors(page) == []


def test_hostile_names_stay_text_and_a_narrow_page_does_not_scroll_sideways(
    page: Chrome, tmp_path: Path
) -> None:
    def hostile(event: Event) -> Event:
        names = {"seat": event.seat + HOSTILE} if event.seat else {}
        if isinstance(event, Detected):
            names |= {"victim": event.victim + HOSTILE, "why": HOSTILE}
        return msgspec.structs.replace(event, **names)

    ended = JobEnded(ok=True, message=HOSTILE, node="launcher", time_s=BEGIN_S + 99)
    write(tmp_path / "run", iter([*map(hostile, training(3, steps=30, lose_every=9)), ended]))
    with dashboard(tmp_path / "run") as address:
        chromium.resize(page, 390, 900)
        try:
            page.get(address)
            until(lambda: "onerror" in text(page, "messages"), "the hostile text")
            page.find_elements(By.CSS_SELECTOR, ".node")[0].click()
            until(lambda: "onerror" in text(page, "node"), "the hostile worker")
            assert page.execute_script("return document.images.length") == 0
            assert page.title.startswith("done")
            wide = page.execute_script("return document.documentElement.scrollWidth")
            assert wide <= 390
            assert errors(page) == []
        finally:
            chromium.resize(page, 1320, 1000)


def test_a_wrong_token_is_told_and_another_can_be_given(page: Chrome, tmp_path: Path) -> None:
    write(tmp_path / "run", training(2, steps=3))
    with dashboard(tmp_path / "run") as address:
        bare, _, token = address.partition("#")
        page.get(f"{bare}#wrong")
        until(lambda: "does not take this token" in text(page, "banner"), "the refusal")
        page.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
        until(lambda: steps_shown(page) == 3, "the run")
        assert all("401" in each for each in errors(page))
