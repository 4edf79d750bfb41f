"""Servers of object stores that die, come back or stop in the middle of a write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from own_servers import OwnServer

from holdfast.ckpt.errors import StoreError

MIB = 1 << 20
LARGE = os.urandom(12 * MIB)
MOSTLY = pytest.mark.parametrize(
    "server_of_a_module",
    ["s3", "az", pytest.param("gs", marks=pytest.mark.exhaustive)],
    indirect=True,
)
"""Azure's and Google's interface share the code that tries again: releases try both."""


def half_then(action: Callable[[], object]) -> Iterator[bytes]:
    yield LARGE[: 7 * MIB]
    action()
    yield LARGE[7 * MIB :]


def test_a_server_killed_during_a_write_leaves_no_torn_file(own_server: OwnServer) -> None:
    store = own_server.place.store(stall_s=0.5, deadline_s=1.5)
    own_server.place.store().write("f", [b"old"])
    own_server.settle("f")
    with pytest.raises(StoreError, match=r"cannot write .*tried \d+ times"):
        store.write("f", half_then(own_server.kill))
    own_server.start()
    for again in (own_server.witness.store(), own_server.place.store()):
        assert again.read("f") == b"old"
        assert again.names("") == ["f"]
    again.write("f", [LARGE])
    assert again.read("f") == LARGE


def test_a_write_outlives_a_server_that_is_restarted(own_server: OwnServer) -> None:
    def restart() -> None:
        own_server.kill()
        own_server.start()

    store = own_server.place.store(deadline_s=60.0)
    store.write("f", [b"old"])
    own_server.settle("f")
    try:
        assert store.write("f", half_then(restart)) == len(LARGE)
    except StoreError as error:  # a killed Azurite may have lost parts that it had confirmed
        assert own_server.place.kind == "az"
        assert "write it again" in str(error)
        assert store.read("f") == b"old"
        store.write("f", [LARGE])
    assert own_server.witness.store().read("f") == LARGE


@MOSTLY
def test_a_write_outlives_a_server_that_stops_for_a_while(own_server: OwnServer) -> None:
    waking = threading.Timer(3.0, own_server.wake)

    def stop() -> None:
        own_server.stop()
        waking.start()

    store = own_server.place.store(stall_s=2.0, deadline_s=60.0)
    assert store.write("f", half_then(stop)) == len(LARGE)
    waking.join()
    assert own_server.witness.store().read("f") == LARGE


@MOSTLY
def test_a_server_that_stays_stopped_is_given_up_in_time(own_server: OwnServer) -> None:
    own_server.place.store().write("f", [bytes(100)])
    store, room = own_server.place.store(stall_s=0.5, deadline_s=1.2), bytearray(100)
    file = store.open("f")
    own_server.stop()
    start_s = time.monotonic()
    for action in (
        lambda: file.read_into([room], 0),
        lambda: store.read("f"),
        lambda: store.replace("f", b"x", expected=None),
        lambda: store.write("f", [LARGE]),
    ):
        with pytest.raises(StoreError, match=r"[Tt]ime.*tried \d+ times|tried \d+ times.*[Tt]ime"):
            action()
    assert time.monotonic() - start_s < 60
