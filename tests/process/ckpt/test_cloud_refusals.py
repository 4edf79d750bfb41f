"""Refusals at az://: keys, names, and servers that die, come back or stop."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import azurite
import keeper
import pytest
from ports import free_ports
from service_fixtures import CloudPlace, azure_place_of

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.cloud.config import AZURE, GOOGLE, CloudConfig
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.store.places import open_store

MIB = 1 << 20
LARGE = os.urandom(12 * MIB)
SAVED_S = 7.0
"""Azurite writes its index every five seconds."""
WRONG = "bm90IHRoZSByaWdodCBvbmU="


def store_of(place: CloudPlace, **changes: Any) -> CloudStore:
    return CloudStore(place.url, place.config(**changes))


@dataclass
class Abused:
    """An Azurite of this test's own, to be killed and stopped."""

    place: CloudPlace
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        with (self.folder / "azurite.out").open("ab") as log:
            self.process = azurite.start(self.folder, self.port, log)


@pytest.fixture
def abused(tmp_path: Path, azurite_installed: None) -> Iterator[Abused]:
    port, log_path = free_ports(1)[0], tmp_path / "azurite.out"
    facts = {
        "endpoint": f"http://127.0.0.1:{port}/{azurite.ACCOUNT}",
        "account": azurite.ACCOUNT,
        "key": azurite.KEY,
        "container": azurite.CONTAINER,
    }
    with log_path.open("ab") as log:
        process = azurite.start(tmp_path, port, log)
    found = Abused(azure_place_of(facts), tmp_path, port, process)
    try:
        azurite.await_container(facts, process, log_path)
        yield found
    finally:
        keeper.end(found.process)


def every_action(store: CloudStore) -> list[Callable[[], object]]:
    return [
        lambda: store.write("f", [b"x"]),
        lambda: store.write("f", [LARGE]),
        lambda: store.replace("f", b"x", expected=None),
        lambda: store.read("f"),
        lambda: store.names(""),
        lambda: store.delete(["f"]),
    ]


def test_wrong_keys_are_named_and_kept_secret(azure_place: CloudPlace) -> None:
    place = replace(azure_place, settings=azure_place.settings | {"account_key": WRONG})
    store, start_s = store_of(place), time.monotonic()
    for action in [*every_action(store), lambda: store.size("f"), lambda: store.open("f")]:
        with pytest.raises(StoreError, match=r"403 .*check AZURE_STORAGE_ACCOUNT_NAME") as caught:
            action()
        assert place.url in str(caught.value)
        for text in (str(caught.value), repr(store), repr(place.config())):
            assert WRONG not in text
    assert time.monotonic() - start_s < 60  # it was not tried again


def test_a_missing_container_is_named(azure_place: CloudPlace) -> None:
    store = store_of(replace(azure_place, container="not-there"))
    for action in every_action(store)[:5]:
        with pytest.raises(StoreError, match=r"az://not-there/.*create the container or correct"):
            action()


def test_an_account_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "AZURITE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=r"az://some: .*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://some/where")


def test_credentials_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    settings = (("application_credentials", str(tmp_path / "none")),)
    with pytest.raises(StoreError, match=r"gs://some: .*GOOGLE_APPLICATION_CREDENTIALS"):
        CloudStore("gs://some/where", CloudConfig(provider=GOOGLE, settings=settings))


def test_an_endpoint_where_nobody_listens(azure_place: CloudPlace) -> None:
    place = azure_place.through(f"http://127.0.0.1:{free_ports(1)[0]}")
    store, start_s = store_of(place, stall_s=0.3, deadline_s=1.0), time.monotonic()
    for action in every_action(store):
        with pytest.raises(
            StoreError, match=r"refused.*tried \d+ times.*AZURE_STORAGE_ENDPOINT|tried \d+ times"
        ):
            action()
    assert time.monotonic() - start_s < 60


def test_the_environment_says_where_the_server_is(azure_environment: CloudPlace) -> None:
    store = open_store(azure_environment.url)
    store.write("step-000000000001/f", [b"x"])
    assert store.names("") == ["step-000000000001"]
    assert store.where("f") == f"{azure_environment.url}/f"


@pytest.mark.parametrize("root", ["az://", "az:///x", "gs://?x"])
def test_an_address_without_a_container_is_refused(root: str) -> None:
    with pytest.raises(StoreError, match=r"write (az://container|gs://bucket)/prefix"):
        open_store(root)


def test_the_scheme_may_be_written_in_capitals(azure_place: CloudPlace) -> None:
    store = CloudStore(azure_place.url.replace("az:", "AZ:"), azure_place.config())
    assert store.root == azure_place.url
    assert AZURE.example() == "az://container/prefix"


def half_then(action: Callable[[], object]) -> Iterator[bytes]:
    yield LARGE[: 7 * MIB]
    action()
    yield LARGE[7 * MIB :]


def test_a_server_killed_during_a_write_leaves_no_torn_file(abused: Abused) -> None:
    store = store_of(abused.place, stall_s=0.5, deadline_s=1.5)
    store.write("f", [b"old"])
    time.sleep(SAVED_S)
    with pytest.raises(StoreError, match=r"cannot write it: .*tried \d+ times"):
        store.write("f", half_then(abused.kill))
    abused.start()
    again = store_of(abused.place)
    assert again.read("f") == b"old"
    assert again.names("") == ["f"]
    again.write("f", [LARGE])
    assert again.read("f") == LARGE


def test_a_write_outlives_a_server_that_is_restarted(abused: Abused) -> None:
    def restart() -> None:
        abused.kill()
        abused.start()

    store = store_of(abused.place, deadline_s=60.0)
    store.write("f", [b"old"])
    time.sleep(SAVED_S)
    try:
        assert store.write("f", half_then(restart)) == len(LARGE)
    except StoreError as error:  # the killed server may have lost parts that it had confirmed
        assert "write it again" in str(error)
        assert store.read("f") == b"old"
        store.write("f", [LARGE])
    assert store.read("f") == LARGE


def test_a_write_outlives_a_server_that_stops_for_a_while(abused: Abused) -> None:
    waking = threading.Timer(1.5, lambda: abused.process.send_signal(signal.SIGCONT))

    def stop() -> None:
        abused.process.send_signal(signal.SIGSTOP)
        waking.start()

    store = store_of(abused.place, stall_s=0.5, deadline_s=30.0)
    assert store.write("f", half_then(stop)) == len(LARGE)
    waking.join()
    assert store.read("f") == LARGE


def test_a_server_that_stays_stopped_is_given_up_in_time(abused: Abused) -> None:
    store_of(abused.place).write("f", [bytes(100)])
    store, room = store_of(abused.place, stall_s=0.5, deadline_s=1.2), bytearray(100)
    file = store.open("f")
    abused.process.send_signal(signal.SIGSTOP)
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
