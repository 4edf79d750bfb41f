"""Environments behind HTTP and behind the Model Context Protocol, with servers that really die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from tree import HELPERS

from holdfast.adapters.rl.environments.base import Action, Environment, Observation, ToolError
from holdfast.adapters.rl.environments.remote.mcp import McpEnvironment
from holdfast.adapters.rl.environments.remote.plain import HttpEnvironment
from holdfast.elastic.errors import ConfigError

SERVER = [sys.executable, str(HELPERS / "mcp_server.py")]


def action(text: str, *, turn: int = 0, state: Any = None) -> Action:
    return Action(ordinal=4, sample=1, turn=turn, text=text, ended=True, state=state)


@contextmanager
def mcp_at_address() -> Iterator[str]:
    """Serve the environment of `mcp_server` by HTTP; yield its address."""
    server = subprocess.Popen([*SERVER, "--http"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
    finally:
        server.kill()
        server.wait()


def plays(environment: Environment) -> None:
    """Play an episode of two turns."""
    assert environment.prompt(4) == "4+7>"
    first = environment.respond(action("a"))
    assert first == Observation(text="again>", state=["a"])
    last = environment.respond(action("b", turn=1, state=first.state))
    assert last == Observation(reward=0.5)


def test_a_server_that_a_command_starts_is_an_environment() -> None:
    environment = McpEnvironment(seed=7, command=SERVER)
    plays(environment)
    for text, message in (
        ("die", "gave no answer to tools/call"),
        ("error", "respond: out of order"),
        ("garbage", "respond answered garbage"),
        ("other", "respond answered without text, state or reward"),
    ):
        with pytest.raises(ToolError, match=message):
            environment.respond(action(text))
        plays(environment)


def test_a_server_that_hangs_is_killed_after_a_silence() -> None:
    environment = McpEnvironment(seed=7, command=SERVER, silence_s=0.5)
    with pytest.raises(ToolError, match=r"is silent for 0.5 s"):
        environment.respond(action("hang"))


def test_a_server_at_an_address_is_an_environment() -> None:
    with mcp_at_address() as url:
        environment = McpEnvironment(seed=7, url=url)
        plays(environment)
        with pytest.raises(ToolError, match="respond: out of order"):
            environment.respond(action("error"))
        with pytest.raises(ToolError):
            environment.respond(action("die"))
    with pytest.raises(ToolError):
        environment.respond(action("a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give command, which starts a server, or url"),
        ({"command": ["x"], "url": "http://x"}, "give command, which starts a server, or url"),
        ({"url": "tcp://x"}, "url is 'tcp://x', needed: http://host:port"),
    ],
)
def test_settings_that_name_no_server_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        McpEnvironment(seed=7, **given)


def test_a_command_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        McpEnvironment(seed=7, command=["no-such-program"]).respond(action("a"))


class Plain(BaseHTTPRequestHandler):
    """An environment behind plain HTTP; ``failing`` requests are answered with a status first."""

    failing: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.failing.pop() if self.failing else 200
        if self.path == "/prompt":
            body = json.dumps({"prompt": f"{given['ordinal']}+{given['seed']}>"})
        elif given["text"] == "garbage":
            body = "no JSON"
        elif given["turn"]:
            body = json.dumps({"reward": 0.5})
        else:
            body = json.dumps({"text": "again>", "state": [given["text"]]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_two_addresses_are_an_environment() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        environment = HttpEnvironment(seed=7, url=url)
        plays(environment)
        with pytest.raises(ToolError, match="answered garbage"):
            environment.respond(action("garbage"))
        Plain.failing[:] = [503]
        with pytest.raises(ToolError, match="status 503"):
            environment.respond(action("a"))
        Plain.failing[:] = [500, 503]
        assert environment.prompt(4) == "4+7>", "no call is made again for a prompt"
        Plain.failing[:] = [404]
        with pytest.raises(ConfigError, match=r"status 404.*the same request would be refused"):
            environment.respond(action("a"))
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(ToolError, match="Connect"):
        environment.respond(action("a"))
