"""The dashboard's web server: one page, its state as server-sent events, and answers on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.resources import files
from typing import Final, Protocol

import msgspec
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.ckpt.errors import HoldfastError
from holdfast.tools.dashboard.forecast import LossForecast
from holdfast.tools.dashboard.guard import Guard
from holdfast.tools.dashboard.hub import Hub
from holdfast.tools.live.view import RunView

MOST_PAGES: Final = 32
"""The pages that may look at the same time."""

_BEAT_S: Final = 0.5
_PING_S: Final = 10
_SEND_S: Final = 20.0
"""The time after which a page that takes nothing is dropped; it connects again by itself."""

_MOST_ASKED: Final = 4096

_KINDS: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "parts", "charts", "dom")
    },
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Losses(Protocol):
    """Says what the loss of nodes would cost now; raises a ``HoldfastError`` if it cannot."""

    def together(self, nodes: Sequence[str], view: RunView) -> LossForecast:
        """Return the cost of losing them at once."""

    def each(self, nodes: Sequence[str], view: RunView) -> list[LossForecast]:
        """Return the cost of losing each alone; no nodes are all of them."""


class Dashboard:
    """The routes. ``losses`` tells what a loss would cost, ``report`` makes the page to keep."""

    def __init__(self, hub: Hub, *, losses: Losses, report: Callable[[], str]) -> None:
        self._hub, self._losses, self._report = hub, losses, report
        self._pages = 0
        self._asking = asyncio.Semaphore(2)

    def app(self, *, token: str, hosts: Iterable[str]) -> Starlette:
        """Return the application, behind its guard."""
        routes = [Route(path, self._file, methods=["GET"]) for path in _KINDS]
        routes += [
            Route("/events", self._events, methods=["GET"]),
            Route("/node", self._node, methods=["GET"]),
            Route("/losses", self._lost, methods=["GET"]),
            Route("/report.html", self._reported, methods=["GET"]),
        ]
        guard = Middleware(Guard, token=token, hosts=tuple(hosts))
        return Starlette(routes=routes, middleware=[guard])

    async def _file(self, request: Request) -> Response:
        name, kind = _KINDS[request.url.path]
        data = files("holdfast.tools.dashboard").joinpath("page", name).read_bytes()
        return Response(data, media_type=kind)

    async def _events(self, request: Request) -> Response:
        if self._pages >= MOST_PAGES:
            return PlainTextResponse(f"{MOST_PAGES} pages look already: close one", status_code=503)
        return EventSourceResponse(self._stream(), ping=_PING_S, send_timeout=_SEND_S)

    async def _stream(self) -> AsyncIterator[dict[str, str]]:
        """Yield what changed, at most twice a second, as it is when the page takes it."""
        self._pages += 1
        try:
            self._hub.look()
            await run_in_threadpool(self._hub.refresh)
            version = 0
            while True:
                self._hub.look()
                if self._hub.board.version != version:
                    version, data = self._hub.board.since(version)
                    if data != b"{}":
                        yield {"data": data.decode()}
                await asyncio.sleep(_BEAT_S)
        finally:
            self._pages -= 1

    async def _node(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        for node in self._hub.view.nodes:
            if node.node == name:
                return _json(node)
        return PlainTextResponse("there is no such node", status_code=404)

    async def _lost(self, request: Request) -> Response:
        names = request.query_params.getlist("node")[:_MOST_ASKED]
        ask = self._losses.each if "each" in request.query_params else self._losses.together
        async with self._asking:
            try:
                return _json(await run_in_threadpool(ask, names, self._hub.view))
            except (HoldfastError, OSError) as error:
                return _json({"error": str(error)})

    async def _reported(self, request: Request) -> Response:
        text = await run_in_threadpool(self._report)
        return Response(text, media_type="text/html; charset=utf-8")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
