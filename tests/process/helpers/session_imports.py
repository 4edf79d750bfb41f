"""A fork server of the test session: jobs start with its imports instead of making their own.

It takes four seconds of processor time to import torch, for each node of each job.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from holdfast.ckpt.descriptors import readable
from holdfast.elastic.agent.workers import WORKER_DEFAULTS
from holdfast.elastic.launch.config import LaunchConfig, python_command
from holdfast.elastic.preload.client import ForkServer, ServerSpec, ServerState
from holdfast.elastic.preload.program import PRELOAD_ENV, module_names

PRELOAD = module_names(os.environ.get(PRELOAD_ENV, "torch,torch.distributed.fsdp,torch._dynamo"))
"""The modules that the nodes of jobs which train with torch import once, as with ``--preload``.

A replacement then starts without the imports. ``HOLDFAST_PRELOAD=`` makes every worker start by
itself.
"""

IMPORTING_ONCE = {PRELOAD_ENV: ",".join(PRELOAD)}
"""The environment of a command whose job is to import them once, not in each of its processes."""

_OF_ONE_TEST = "PYTEST_CURRENT_TEST"
_LOAD_S = 120.0
_started: list[tuple[ForkServer, dict[str, str]]] = []


def session_imports(config: LaunchConfig) -> ForkServer | None:
    """Return the session's server, if the nodes of the job would import just the same."""
    if not PRELOAD or config.preload != PRELOAD or config.env or config.agent_env:
        return None
    if threading.current_thread() is not threading.main_thread():
        return None  # it would end with this thread
    environment = {name: value for name, value in os.environ.items() if name != _OF_ONE_TEST}
    if not _started:
        _started.append((_start(environment), environment))
    server, known = _started[0]
    return server if environment == known else None


def _start(environment: dict[str, str]) -> ForkServer:
    spec = ServerSpec(
        command=python_command(Path(__file__), []),
        env={**WORKER_DEFAULTS, **environment},
        name="session",
        output=None,
    )
    server = ForkServer.start(PRELOAD, spec)
    until_s = time.monotonic() + _LOAD_S
    while server.state is ServerState.LOADING and time.monotonic() < until_s:
        readable([server.socket.fileno()], 1.0)
        server.check()
    assert server.state is ServerState.READY, (server.module, server.why)
    return server
