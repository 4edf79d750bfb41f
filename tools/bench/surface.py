"""Section surface: a step with dashboard, top, metrics and traces on, beside one without.

One job trains all the time, on two nodes whose trainers keep two cores busy. Its readers are
processes beside it, which are stopped and let go on in turn, so that a window with them lies
between two without. A scraper, a browser's stream and a collector take what they offer.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import StepDone, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command
from holdfast.elastic.launch.local import Launcher
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.environment import cpu_s
from holdfast.tools.ports import free_ports

ALL: Final = "a step with all readers"
NONE: Final = "without"

_WINDOW_S, _QUICK_WINDOW_S = 20.0, 6.0
_SETTLE_S: Final = 1.0
_START_S: Final = 300.0
_SCRAPE_S: Final = 15.0
_IMPORTS_S: Final = 10.0
_NEEDS: Final = {
    "metrics": "prometheus_client",
    "traces": "opentelemetry.sdk",
    "top": "holdfast.tools.top",
    "dashboard": "starlette",
}
_SCRIPT: Final = """\
import sys
from pathlib import Path

import torch

import holdfast

torch.set_num_threads(1)


@holdfast.resilient(batch=holdfast.Batch(microbatches=2, size=64))
def train(run):
    width = int(sys.argv[2])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(512, width)
    for _ in run.steps(10**9):
        for batch in run.microbatches(data):
            loss = model(batch).square().mean()
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        if Path(sys.argv[1]).exists():
            run.stop()


train()
"""


def surface(setup: BenchSetup) -> list[Figure]:
    """Time steps in windows with the readers and without, in turn."""
    window_s = _QUICK_WINDOW_S if setup.quick else _WINDOW_S
    run_dir, end = setup.directory / "surface", setup.directory / "surface-ends"
    script = setup.directory / "surface.py"
    script.write_text(_SCRIPT)
    windows: list[tuple[bool, float, float]] = []
    with (
        Tempo(setup, total=2 * setup.repeat + 1) as tempo,
        _job(run_dir, script, end, width=256 if setup.quick else 768),
        _readers(run_dir) as readers,
    ):
        for number in range(2 * setup.repeat + 1):
            on = bool(number % 2)
            readers.let(on)
            tempo.say("with readers" if on else "without")
            time.sleep(_SETTLE_S)
            began_s = time.time()
            readers.count(on)
            time.sleep(window_s)
            readers.count(on)
            windows.append((on, began_s, time.time()))
            tempo.beat()
        readers.let(True)
        used = readers.used()
    events = of_kind(EventReader(run_dir).new(), StepDone)
    return [*_compared(windows, events), *_costs(used, setup.repeat * window_s)]


def _compared(
    windows: Sequence[tuple[bool, float, float]], events: Sequence[StepDone]
) -> Iterator[Figure]:
    """Yield the time of a step in each kind of window; each with readers lies between two."""
    times: list[float] = []
    for _, began_s, ended_s in windows:
        found = [e.seconds for e in events if e.rank == 0 and began_s <= e.time_s < ended_s]
        if not found:
            raise PeerError("no step ended in a window of the benchmark; run it on a quiet machine")
        times.append(statistics.fmean(found))
    on = [each for (is_on, _, _), each in zip(windows, times, strict=True) if is_on]
    off = [each for (is_on, _, _), each in zip(windows, times, strict=True) if not is_on]
    pairs = [here / statistics.fmean(off[at : at + 2]) for at, here in enumerate(on)]
    without = statistics.median(off)
    yield Figure(
        section="surface",
        name=ALL,
        value=statistics.median(on),
        unit="s",
        low=min(on),
        high=max(on),
        versus=NONE,
        ratio=statistics.median(pairs),
        samples=tuple(on),
    )
    yield Figure(
        section="surface",
        name="a step without readers",
        value=without,
        unit="s",
        low=min(off),
        high=max(off),
        samples=tuple(off),
    )
    yield Figure(
        section="surface",
        name="ratio of a window to its neighbours",
        value=statistics.median(pairs),
        unit="",
        low=min(pairs),
        high=max(pairs),
        samples=tuple(pairs),
    )


def _costs(used: dict[str, float], seconds: float) -> Iterator[Figure]:
    """Yield the processor time of each reader, as a share of one core."""
    for name, busy_s in used.items():
        value = busy_s / seconds
        yield Figure(
            section="surface",
            name=f"processor of {name}",
            value=value,
            unit="cores",
            low=value,
            high=value,
        )


@contextmanager
def _job(run_dir: Path, script: Path, end: Path, *, width: int) -> Iterator[None]:
    """Train on two nodes from the first protected step to the end of the block."""
    config = LaunchConfig(
        command=python_command(script, [str(end), str(width)]),
        nodes=tuple(NodeSpec(name=f"n{i}", slots={"trainer": 1}) for i in range(2)),
        wanted={"trainer": 2},
        run_dir=run_dir,
    )
    launcher = Launcher(config)
    launcher.start()
    try:
        reader, deadline_s = EventReader(run_dir), time.monotonic() + _START_S
        while not any(event.protected >= 1 for event in of_kind(reader.new(), StepDone)):
            if (outcome := launcher.wait(0.1)) is not None or time.monotonic() > deadline_s:
                raise PeerError(f"the job of the benchmark does not train: {outcome}")
        yield
        end.touch()
        launcher.wait(_START_S)
    finally:
        launcher.kill()
        launcher.wait(_START_S)


class _Beside:
    """The readers' processes, which go on or stand still together, and their processor time."""

    def __init__(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._since: dict[str, float] = {}
        self._used = dict.fromkeys(processes, 0.0)
        self.on = threading.Event()
        self.on.set()

    def let(self, on: bool) -> None:
        """Let them go on, or stop them."""
        (self.on.set if on else self.on.clear)()
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def count(self, on: bool) -> None:
        """Begin to count their processor time, or end; without them nothing is counted."""
        now = {name: cpu_s(process.pid) for name, process in self._processes.items()} if on else {}
        for name, busy_s in now.items() if self._since else ():
            self._used[name] += busy_s - self._since[name]
        self._since = {} if self._since else now

    def used(self) -> dict[str, float]:
        """Return the processor time that was counted, in seconds."""
        return self._used


@contextmanager
def _readers(run_dir: Path) -> Iterator[_Beside]:
    """Start all readers whose packages are there, and who takes what they offer."""
    with ExitStack() as stack:
        url = stack.enter_context(_collecting())
        (port,) = free_ports(1)
        commands = {
            "metrics": ["metrics", str(run_dir), "--listen", str(port), "--beside"],
            "traces": ["traces", str(run_dir), "--otlp", url, "--beside"],
            "top": ["top", str(run_dir), "--lines", "--every", "1"],
            "dashboard": ["dashboard", str(run_dir), "--port", "0"],
        }
        processes = {}
        for name, words in commands.items():
            if not _is_there(_NEEDS[name]):
                continue
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.tools.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "dashboard" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "NO_PROXY": "127.0.0.1"},
            )
            stack.callback(_end, process)
            processes[name] = process
        beside = _Beside(processes)
        over = threading.Event()
        stack.callback(over.set)
        pages = [f"http://127.0.0.1:{port}/metrics"] if "metrics" in processes else []
        takers = [threading.Thread(target=_scrape, args=(pages, beside, over), daemon=True)]
        if "dashboard" in processes:
            takers.append(
                threading.Thread(target=_watch, args=(processes["dashboard"], over), daemon=True)
            )
        for taker in takers:
            taker.start()
        time.sleep(_IMPORTS_S)  # they are not what is measured
        yield beside


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def _scrape(pages: Sequence[str], beside: _Beside, over: threading.Event) -> None:
    """Read the metrics as often as Prometheus would."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not over.wait(_SCRAPE_S):
        for page in pages if beside.on.is_set() else ():
            try:
                opener.open(page, timeout=_START_S).read()
            except OSError:
                continue


def _watch(dashboard: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Take the stream of the dashboard as a page does."""
    assert dashboard.stdout is not None
    address, _, token = dashboard.stdout.readline().decode().strip().rpartition("/#")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{address.rpartition(' ')[2]}/events", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with opener.open(request, timeout=_START_S) as stream:
            while not over.is_set() and stream.read1(1 << 16):
                pass
    except (OSError, HTTPException):  # the dashboard ended
        return


@contextmanager
def _collecting() -> Iterator[str]:
    """Run a collector that takes everything and keeps nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the figures, one a line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("median", "min–max", "×"):
        table.add_column(title, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(figure.name, *_cells(figure))
    console.print(table)


def _cells(figure: Figure) -> tuple[str, str, str]:
    if figure.unit == "cores":
        return f"{100 * figure.value:.2f} % of a core", "", ""
    spread = f"{figure.low:.4f}–{figure.high:.4f}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.4f}"
    return f"{figure.value:.4f}{' s' if figure.unit == 's' else ''}", spread, ratio
