"""The server of `/metrics`: prometheus_client's, in threads of its own, with our registry only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import start_http_server

from holdfast.tools.beside.places import ServedPlace
from holdfast.tools.metrics.exposition import registry
from holdfast.tools.metrics.families import MetricSample


@contextlib.contextmanager
def serving(
    place: ServedPlace, samples: Callable[[], Iterable[MetricSample]]
) -> Iterator[ServedPlace]:
    """Serve samples until the end of the block; yield the place with the port it has got.

    Raises ``OSError`` naming the place if it cannot be served at.
    """
    try:
        server, thread = start_http_server(place.port, place.host, registry(samples))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error
    try:
        yield place._replace(port=server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
