"""A small server of the Model Context Protocol whose tools are an environment; no library.

python mcp_server.py [--http] speaks on its standard streams, or by streamable HTTP at a port that
it prints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SESSION = "one"


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message, None for a notification."""
    if "id" not in message:
        return None
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        found: dict[str, Any] = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    elif method == "tools/call":
        found = call(params["name"], params["arguments"])
    else:
        error = {"code": -32601, "message": f"no method {method}"}
        return {"jsonrpc": "2.0", "id": message["id"], "error": error}
    return {"jsonrpc": "2.0", "id": message["id"], "result": found}


def call(tool: str, given: dict[str, Any]) -> dict[str, Any]:
    """Carry out a tool; do to this process what the policy's text says."""
    if tool == "prompt":
        text = json.dumps({"prompt": f"{given['ordinal']}+{given['seed']}>"})
        return {"content": [{"type": "text", "text": text}]}
    match given["text"]:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "error":
            return {"content": [{"type": "text", "text": "out of order"}], "isError": True}
        case "garbage":
            return {"content": [{"type": "text", "text": "no JSON"}]}
        case "other":
            return {"content": [], "structuredContent": {"colour": "red"}}
    state = [*(given["state"] or []), given["text"]]
    reply = {"reward": 0.5} if given["turn"] else {"text": "again>", "state": state}
    return {"content": [], "structuredContent": reply}


class Handler(BaseHTTPRequestHandler):
    """Streamable HTTP: an answer is an event where it is to a tool, and JSON elsewhere."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = message.get("method") == "initialize"
        if not first and self.headers.get("Mcp-Session-Id") != _SESSION:
            self._send(400, b"no session", "text/plain")
            return
        found = answer(message)
        if found is None:
            self._send(202, b"", "text/plain")
        elif first:
            self._send(200, json.dumps(found).encode(), "application/json")
        else:
            ping = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            events = f"data: {ping}\n\ndata: {json.dumps(found)}\n\n"
            self._send(200, events.encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Mcp-Session-Id", _SESSION)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    if sys.argv[1:2] == ["--http"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_port, flush=True)
        server.serve_forever()
    for number, line in enumerate(sys.stdin):
        if not number:  # a server may ask, too
            print(json.dumps({"jsonrpc": "2.0", "id": "theirs", "method": "ping"}), flush=True)
        message = json.loads(line)
        if "method" in message and (found := answer(message)) is not None:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
