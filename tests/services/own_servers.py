"""Object stores' servers of one module's own: to be killed, started again and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import azurite
import ceph
import google_xml
import keeper
import pytest
from object_places import (
    KINDS,
    ObjectPlace,
    S3Place,
    azure_place_of,
    google_place_of,
    new_prefix,
    s3_place_of,
)
from ports import free_ports

SERVICES = {"s3": "s3_server", "az": "azurite", "gs": "google_xml"}
"""Kind → the fixture of the service that all tests share."""

_SETTLED_S = 60.0


class OwnServer:
    """A server of one module's own, to be killed, started again and stopped for a while.

    ``place`` is reached through it. ``witness`` is the same place: through another server of the
    same files where there is one, else through this one.
    """

    def __init__(
        self,
        place: ObjectPlace,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        witness: ObjectPlace | None = None,
        is_kept: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self.place, self.witness = place, witness or place
        self._start, self._is_kept = start, is_kept
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        return self._processes[-1]

    def renew(self) -> None:
        """Have it run, with a prefix that nobody used before."""
        if self.process.poll() is not None:
            self.start()
        self.wake()
        self.place = replace(self.place, prefix=(prefix := new_prefix()))
        self.witness = replace(self.witness, prefix=prefix)

    def start(self) -> None:
        """Start it, at the same address each time."""
        self._processes.append(self._start())

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it without closing its connections."""
        keeper.hang(self.process)

    def wake(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def settle(self, name: str) -> None:
        """Wait until the server would know a file again after a kill."""
        deadline_s = time.monotonic() + _SETTLED_S
        while not self._is_kept(f"{self.place.prefix}/{name}"):
            assert time.monotonic() < deadline_s, f"{name} is not kept"
            time.sleep(0.05)

    def end(self) -> None:
        """Kill all of its processes."""
        keeper.end(*self._processes)


def _own_gateway(place: S3Place) -> OwnServer:
    """Return a gateway of its own to the cluster that all tests share."""
    port, config = free_ports(1)[0], Path(place.ceph_config)

    def start() -> subprocess.Popen[bytes]:
        with config.with_name("gateway.out").open("ab") as log:
            return ceph.gateway(config, f"own{port}", log, port=port)[0]

    through = place.through(f"http://127.0.0.1:{port}")
    server = OwnServer(through, start, witness=place)
    ceph.await_gateway(through.facts)
    return server


def _own_azurite(folder: Path) -> OwnServer:
    port, log_path = free_ports(1)[0], folder / "azurite.out"
    facts = azurite.facts_of(port)

    def start() -> subprocess.Popen[bytes]:
        with log_path.open("ab") as log:
            return azurite.start(folder, port, log)

    def is_kept(key: str) -> bool:
        """Azurite writes its two indices every five seconds."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            blobs, extents = (
                (folder / f"__azurite_db_blob{kind}__.json").read_text() for kind in ("", "_extent")
            )
            found = [
                each
                for collection in json.loads(blobs)["collections"]
                for each in collection["data"]
                if each.get("name") == key
            ]
            return bool(found) and all(each["persistency"]["id"] in extents for each in found)
        return False

    server = OwnServer(azure_place_of(facts), start, is_kept=is_kept)
    azurite.await_container(facts, server.process, log_path)
    return server


def _own_google(folder: Path) -> OwnServer:
    port = free_ports(1)[0]

    def start() -> subprocess.Popen[bytes]:
        with (folder / "google.out").open("ab") as log:
            return google_xml.start(folder, port, log)

    return OwnServer(google_place_of(google_xml.facts_of(port)), start)


@pytest.fixture(scope="module", params=KINDS)
def server_of_a_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnServer]:
    """Yield a server of this module's own, of one kind after the other."""
    facts = request.getfixturevalue(SERVICES[request.param])  # installed, or the test skips
    if request.param == "s3":
        server = _own_gateway(s3_place_of(facts))
    else:
        folder = tmp_path_factory.mktemp(request.param)
        server = {"az": _own_azurite, "gs": _own_google}[request.param](folder)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def own_server(server_of_a_module: OwnServer) -> OwnServer:
    """Return that server, running, with a prefix of this test's own."""
    server_of_a_module.renew()
    return server_of_a_module
