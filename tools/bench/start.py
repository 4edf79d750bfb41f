"""Section start: the time until workers have their imports, shared and not shared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.elastic.launch.config import python_command
from holdfast.elastic.preload.client import ForkServer, ServerSpec, ServerState
from holdfast.elastic.processes.children import Child
from holdfast.tools.bench.samples import BenchRow, BenchSetup, in_turn, timed

FORKED: Final = "a worker, forked after the imports"
STARTED: Final = "a process that imports"
BARE: Final = "a process without imports"
SHARED: Final = "four nodes that share their imports"
APART: Final = "four nodes that import apart"

_NODES: Final = 4
_MODULES: Final = ("torch", "torch._dynamo", "torch.distributed.fsdp")
_LOAD_S: Final = 600.0
_WORKER: Final = f"import {', '.join(_MODULES)}\nprint(flush=True)\n"
_NODE: Final = """\
import sys
from holdfast.elastic.preload.client import ForkServer
ForkServer.inherited(int(sys.argv[1]))
"""


def start(setup: BenchSetup) -> list[BenchRow]:
    """Time starts of workers and of the fork servers of a machine's nodes."""
    script = setup.directory / "worker.py"
    script.write_text(_WORKER)
    spec = ServerSpec(command=python_command(script, []), env=os.environ, name="bench", output=None)
    with _serving(spec) as server:
        cases = [
            timed(BARE, lambda: _run((sys.executable, "-c", "print(flush=True)"))),
            timed(STARTED, lambda: _run(spec.command)),
            timed(FORKED, lambda: _forked(server)),
            timed(APART, lambda: _apart(spec)),
            timed(SHARED, lambda: _shared(spec)),
        ]
        samples = in_turn(cases, setup)
    return [
        samples.row("start", FORKED, 0, BARE, STARTED),
        samples.row("start", SHARED, 0, BARE, APART),
    ]


@contextmanager
def _serving(spec: ServerSpec) -> Iterator[ForkServer]:
    """Run a fork server that has imported."""
    server = ForkServer.start(_MODULES, spec)
    try:
        _await(server)
        yield server
    finally:
        server.close()


def _await(server: ForkServer) -> None:
    until_s = time.monotonic() + _LOAD_S
    while server.state is ServerState.LOADING and time.monotonic() < until_s:
        readable([server.socket.fileno()], 1.0)
        server.check()
    if server.state is not ServerState.READY:
        raise RuntimeError(f"the fork server has not imported {server.module}: {server.why}")


def _run(command: Sequence[str]) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)


def _forked(server: ForkServer) -> None:
    read, write = os.pipe()
    child = Child(server.fork(env={}, fds=(), output=write))
    os.close(write)
    with os.fdopen(read, "rb") as file:
        file.read(1)
    child.kill()
    child.wait(_LOAD_S)


def _apart(spec: ServerSpec) -> None:
    with ExitStack() as opened:
        servers = [ForkServer.start(_MODULES, spec) for _ in range(_NODES)]
        for server in servers:
            opened.callback(server.close)
        for server in servers:
            _await(server)


def _shared(spec: ServerSpec) -> None:
    with _serving(spec) as server, descriptor_of(b"") as config, ExitStack() as opened:
        null = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, null)
        command = (sys.executable, "-c", _NODE, str(server.first_fd + 1))
        for _ in range(_NODES):
            process = server.branch(command, spec, env=os.environ, stdin=null, config=config)
            opened.callback(Child(process).wait, _LOAD_S)
