"""Tests of the store over the authenticated transport, against a real `MeetingPoint`."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import PrefixStore
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.meeting.point import LOOPBACK, MeetingPoint, keys_of
from holdfast.elastic.meeting.store import MeetingStore

KEY = RunKey.new()
SHORT = timedelta(seconds=0.1)


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    found = MeetingPoint(KEY)
    yield found
    found.close()


@pytest.fixture
def store(point: MeetingPoint) -> Iterator[MeetingStore]:
    found = MeetingStore(point.address, KEY)
    yield found
    found.close()


def test_values_are_bytes_and_may_be_given_as_text(store: MeetingStore) -> None:
    store.set("text", "a")
    store.set("bytes", b"\x00\xff")
    store.set("large", bytes(3 << 20))
    assert (store.get("text"), store.get("bytes")) == (b"a", b"\x00\xff")
    assert store.get("large") == bytes(3 << 20)


def test_the_keys_of_old_generations_are_dropped(point: MeetingPoint, store: MeetingStore) -> None:
    kept = ["stage/0", *(f"{keys_of(number)}/plans/x" for number in (10, 11))]
    for key in (*kept, f"{keys_of(9)}/left/0", f"{keys_of(1)}/x"):
        store.set(key, "v")
    point.forget_before(10)
    assert store.check(kept)
    assert not store.check([f"{keys_of(9)}/left/0"])
    assert not store.check([f"{keys_of(1)}/x"])


def test_every_operation_of_torchs_store(store: MeetingStore) -> None:
    assert not store.check(["n"])
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    assert store.check(["n"])
    assert not store.check(["n", "m"])
    store.append("n", "0")
    assert store.add("n", 0) == 50
    assert (store.delete_key("n"), store.delete_key("n"), store.check(["n"])) == (
        True,
        False,
        False,
    )
    assert store.compare_set("c", "x", "y") == b"x", "absent, and something else was expected"
    assert not store.check(["c"])
    assert store.compare_set("c", "", "y") == b"y"
    assert store.compare_set("c", "", "z") == b"y"
    assert store.compare_set("c", "y", "z") == b"z"
    store.multi_set(["p", "q"], ["1", "2"])
    assert store.multi_get(["q", "p"]) == [b"2", b"1"]
    assert store.multi_get([]) == []


def test_torch_reaches_every_operation_through_a_prefix(store: MeetingStore) -> None:
    prefixed = PrefixStore("inner", PrefixStore("outer", store))
    prefixed.set("a", "1")
    assert (prefixed.get("a"), store.get("outer/inner/a")) == (b"1", b"1")
    prefixed.append("a", "2")
    assert prefixed.add("a", 1) == 13
    assert prefixed.check(["a"])
    assert prefixed.compare_set("a", "13", "x") == b"x"
    prefixed.multi_set(["b", "c"], ["1", "2"])
    prefixed.wait(["b", "c"], timedelta(seconds=1))
    assert prefixed.multi_get(["b", "c"]) == [b"1", b"2"]
    assert prefixed.delete_key("a")
    assert not prefixed.delete_key("a")
    assert prefixed.has_extended_api()


def test_a_wait_ends_as_soon_as_the_last_key_is_there(
    point: MeetingPoint, store: MeetingStore
) -> None:
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.extend(store.multi_get(["a", "b"])))
    waiting.start()
    store.set("a", "1")  # by the same client: a call that waits holds up no other
    point.set("b", b"2")
    waiting.join(60)
    assert got == [b"1", b"2"]


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_key_that_does_not_come_is_named(store: MeetingStore, prefixed: bool) -> None:
    torchs = PrefixStore("g3", store) if prefixed else store
    with pytest.raises(PeerError, match=r"not all of .*rank 7 came within 0\.1 s"):
        torchs.wait(["rank 7"], SHORT)
    store.set_timeout(SHORT)
    with pytest.raises(PeerError, match="rank 7"):
        torchs.get("rank 7")


def test_a_stranger_is_refused_whatever_torch_client_it_uses(point: MeetingPoint) -> None:
    """The attack: whoever reached the port of rank 0 could read and write its keys."""
    host, _, port = point.address.rpartition(":")
    assert host == LOOPBACK, "and not on all addresses"
    limit = timedelta(seconds=1)
    with pytest.raises(RuntimeError):
        torch_private.TCPStore(host, int(port), is_master=False, timeout=limit).set("evil", "x")
    stranger = MeetingStore(point.address, RunKey.new(), answer_s=0.3)
    with pytest.raises(PeerError):
        stranger.set("evil", "x")
    stranger.close()
    with socket.create_connection((host, int(port))) as raw:  # of store_raw.py: set, without torch
        raw.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x01" + b"\x01evil\x01x" * 9)
    mine = MeetingStore(point.address, KEY)
    assert not mine.check(["evil"])
    mine.close()


def test_requests_that_make_no_sense_are_refused_by_name(point: MeetingPoint) -> None:
    client = Client(f"tcp://{point.address}", KEY)
    for op, body in (
        ("set", {"keys": ["a"]}),
        ("add", {"keys": []}),
        ("steal", {"keys": ["a"]}),
        ("check", {"keys": 3}),
        ("compare_set", {"keys": ["a"]}),
    ):
        with pytest.raises(PeerError, match=f"{op}: malformed request"):
            client.call(op, body)
    client.close()


def test_the_end_of_the_server_ends_a_wait_at_once(point: MeetingPoint) -> None:
    store = MeetingStore(point.address, KEY)
    store.set("a", "1")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            store.get("never")
        except PeerError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    point.close()
    waiting.join(60)
    assert "the server has ended" in str(errors[0])
    store.close()


def test_a_closed_store_says_so(store: MeetingStore) -> None:
    store.close()
    with pytest.raises(PeerError, match="its generation is over"):
        store.get("a")


@pytest.mark.parametrize("address", ["", "garbage", "127.0.0.1:", "no such host:1"])
def test_text_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(PeerError, match="no server can be reached there"):
        MeetingStore(address, KEY).get("a")


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
            MeetingPoint(KEY, port=port)


def test_a_request_of_a_client_that_is_gone_is_not_kept(point: MeetingPoint) -> None:
    store = MeetingStore(point.address, KEY)
    with pytest.raises(PeerError):
        store.wait(["never"], SHORT)
    store.close()
    assert point.waiting == 0


def form(point: MeetingPoint, size: int) -> list[torch.Tensor | Exception]:
    """Form a gloo group of threads, and return each one's sum, or its error."""
    found: dict[int, torch.Tensor | Exception] = {}

    def join(rank: int) -> None:
        store = MeetingStore(point.address, KEY)
        try:
            group = torch_private.gloo_group(
                PrefixStore("g1", store), rank, size, host=LOOPBACK, timeout=timedelta(seconds=60)
            )
            tensor = torch.tensor([float(rank)])
            group.allreduce([tensor]).wait()
            found[rank] = tensor
        except Exception as error:  # noqa: BLE001 - shown to the test
            found[rank] = error
        finally:
            store.close()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[rank] for rank in range(size)]


def test_gloo_forms_its_groups_over_it(point: MeetingPoint) -> None:
    for number in range(3):
        sums = form(point, 3)
        assert [each.item() for each in sums if isinstance(each, torch.Tensor)] == [3.0] * 3, sums
        with point._lock:
            point._values.clear()
        gc.collect(number % 3)


def test_gloo_passes_our_errors_on(point: MeetingPoint) -> None:
    store = MeetingStore(point.address, KEY, timeout=SHORT)
    with pytest.raises(PeerError, match="came within"):
        torch_private.gloo_group(
            PrefixStore("g1", store), 0, 2, host=LOOPBACK, timeout=timedelta(seconds=0.2)
        )
    store.close()
