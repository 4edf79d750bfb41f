"""A relay of TCP connections between network namespaces: it hands bytes on as they come."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Final, Self

_RUN_BYTES: Final = 1 << 16


class Relay:
    """Connections to ``listening`` go on to ``host`` and ``port``, as this process reaches them.

    To be entered as a context; at its end all connections are closed.
    """

    def __init__(self, listening: socket.socket, *, host: str, port: int) -> None:
        self._listening, self._host, self._port = listening, host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._stop = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listening)
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()  # the server is not there: the client sees that
            return
        try:
            await asyncio.gather(_hand_on(reader, far_writer), _hand_on(far_reader, writer))
        except OSError:
            return  # one side is gone: the other is told by the end of its connection
        finally:
            writer.close()
            far_writer.close()


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_RUN_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
