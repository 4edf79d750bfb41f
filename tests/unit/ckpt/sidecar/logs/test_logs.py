"""Record logs in sidecars: protected, read, re-copied after losses, and dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles.blocks import make_world
from sidecar_group import DEADLINE_S, SidecarGroup, sidecar_group, wait_until

from holdfast.ckpt.errors import CapacityError, CorruptError, FencedError, NotFoundError, PeerError
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity import budget
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.core.messages import LogCopy, unparse
from holdfast.ckpt.sidecar.logs import operations, record_log
from holdfast.ckpt.sidecar.logs.frames import pack
from holdfast.ckpt.sidecar.logs.places import holders_of, keepers_of
from holdfast.ckpt.transport import Client

RECORDS = [bytes([n]) * n for n in range(1, 60)]


def group_fixture(*nodes: str) -> Callable[[Path], Iterator[SidecarGroup]]:
    @pytest.fixture
    def fixture(tmp_path: Path) -> Iterator[SidecarGroup]:
        with sidecar_group(tmp_path, *nodes, threads=True) as group:
            yield group

    return fixture


one = group_fixture("a")
three = group_fixture("a", "b", "c")
five = group_fixture("a", "b", "c", "d", "e")


def write(client: SidecarClient, records: list[bytes], *, name: str = "tokens") -> int:
    """Append records and have them protected."""
    client.log_open(name)
    end = client.log_append(name, records)
    assert client.log_protected(name, at_least=end, timeout_s=DEADLINE_S) == end
    return end


def has_copies(group: SidecarGroup, node: str, *, name: str = "tokens") -> set[str]:
    """Return the nodes whose sidecar has the log."""
    return {
        holder for holder, sidecar in group.sidecars.items() if (node, name) in sidecar.logs._table
    }


def damage(group: SidecarGroup, holder: str, node: str, *, record: int) -> None:
    """Flip a bit of a record where it lies."""
    log = group.sidecars[holder].logs._table[node, "tokens"]
    segment = log._segments[0]
    segment._room.data[segment._starts[record] + 16] ^= 1


# -- writing and reading -------------------------------------------------------------------------


def test_a_log_is_truncated_here_and_in_its_copies(three: SidecarGroup) -> None:
    three.adopt()
    writer = three.clients["a"]
    write(writer, [b"0", b"1", b"2", b"3"])
    writer.log_truncate("tokens", 2)
    assert writer.log_append("tokens", [b"4"]) == 5
    assert writer.log_open("tokens") == 5
    assert writer.log_protected("tokens", at_least=5, timeout_s=DEADLINE_S) == 5
    assert three.clients["c"].log_read("tokens", node="a") == [b"2", b"3", b"4"]
    three.kill("a", wipe=True)
    assert three.clients["b"].log_read("tokens", node="a") == [b"2", b"3", b"4"]


def test_a_log_survives_its_sidecar(one: SidecarGroup) -> None:
    one.adopt()
    one.clients["a"].log_open("tokens")
    one.clients["a"].log_append("tokens", [b"x", b"", b"yz"])
    one.kill("a", wipe=False)
    one.start("a")
    assert one.clients["a"].log_read("tokens", node="a") == [b"x", b"", b"yz"]
    assert one.clients["a"].log_append("tokens", [b"!"]) == 4


def test_a_log_is_opened_before_it_is_written(one: SidecarGroup) -> None:
    one.adopt()
    with pytest.raises(NotFoundError, match="has no log 'tokens'; open it first"):
        one.clients["a"].log_append("tokens", [b"x"])


def test_a_log_longer_than_a_message_is_read_by_pages(three: SidecarGroup) -> None:
    three.adopt()
    records = [bytes([n]) * 1_000_000 for n in range(20)]
    write(three.clients["a"], records)
    assert three.clients["b"].log_read("tokens", node="a") == records
    assert three.clients["a"].log_read("tokens", node="a") == records


def test_appends_are_refused_when_a_log_is_full_and_go_on_once_it_is_truncated(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "MAX_LOG_BYTES", 1 << 20)
    one.adopt()
    client = one.clients["a"]
    client.log_open("tokens")
    with pytest.raises(CapacityError, match="truncate what has been consumed"):
        for _ in range(20):
            end = client.log_append("tokens", [b"x" * 100_000])
    assert client.status()["counters"]["log_full"] == 1
    client.log_truncate("tokens", end)
    assert client.log_append("tokens", [b"y"]) == end + 1
    assert client.log_read("tokens", node="a") == [b"y"]


def test_all_logs_together_are_bounded(one: SidecarGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    one.adopt()
    monkeypatch.setattr(budget, "LOG_BYTES", 3 * record_log.GRAIN_BYTES)
    client = one.clients["a"]
    for number in range(3):
        client.log_open(f"log {number}")
    with pytest.raises(CapacityError, match="the logs of node a hold"):
        client.log_open("one more")
    client.log_drop("log 0", node="a")
    client.log_open("one more")


def test_memory_stays_flat_while_records_come_and_go(one: SidecarGroup) -> None:
    one.adopt(parity=0)
    client = one.clients["a"]
    client.log_open("tokens")
    for number in range(400):
        end = client.log_append("tokens", [b"x" * 500] * 20)
        client.log_truncate("tokens", end - 100)
        if number > 20:
            assert client.status()["bytes"]["logs"] <= 4 * record_log.GRAIN_BYTES
    files = list(one.sidecars["a"].core.arena.directory.glob("*.log*"))
    assert len(files) <= 2


def test_a_log_that_a_silent_node_may_have_is_to_be_asked_for_again(three: SidecarGroup) -> None:
    three.adopt()
    write(three.clients["a"], RECORDS)
    three.kill("a", wipe=True)
    three.kill("b", wipe=False)
    with pytest.raises(PeerError, match=r"may be on \['b'\], which do not answer; retry"):
        three.clients["c"].log_read("tokens", node="a")
    three.start("b")
    three.adopt(generation=2)
    assert three.clients["c"].log_read("tokens", node="a") == RECORDS
    with pytest.raises(NotFoundError, match="has log 'words'"):
        three.clients["c"].log_read("words", node="a")


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parity", [0, 1, 2, 3])
def test_every_record_is_on_as_many_other_nodes_as_the_parity(
    five: SidecarGroup, parity: int
) -> None:
    world = five.adopt(parity=parity)
    write(five.clients["d"], RECORDS)
    holders = {peer.node for peer in holders_of(world, "d")}
    assert has_copies(five, "d") == {"d", *holders}
    assert holders == set(["e", "a", "b"][:parity])
    for node in ("d", *sorted(holders)[: parity - 1]):
        five.kill(node, wipe=True)
    reader = next(iter(five.clients.values()))
    if parity:
        assert reader.log_read("tokens", node="d") == RECORDS
    else:
        with pytest.raises(NotFoundError):
            reader.log_read("tokens", node="d")


def test_a_holder_that_is_gone_delays_no_append_and_no_other_holder(five: SidecarGroup) -> None:
    five.adopt(parity=2)
    client = five.clients["a"]
    write(client, [b"first"])
    five.kill("b", wipe=True)
    began_s = time.monotonic()
    for number in range(50):
        end = client.log_append("tokens", [b"%d" % number] * 10)
    assert time.monotonic() - began_s < 2
    other = five.sidecars["c"].logs
    wait_until(lambda: other._table["a", "tokens"].end == end, "the other holder has all")
    assert client.log_protected("tokens") == 1
    wait_until(lambda: client.status()["counters"].get("log_late") == 1, "counted as late")
    lag = client.status()["log_lag"]["tokens"]
    assert lag["records"] == end - 1 and lag["bytes"] > 0 and lag["oldest_s"] > 0.5
    assert "b" in client.status()["log_errors"]


def test_what_one_appends_is_sent_within_the_delay_and_not_one_by_one(
    three: SidecarGroup,
) -> None:
    three.adopt()
    client = three.clients["a"]
    end = write(client, [b"first"])
    calls = []
    holder = three.sidecars["b"]
    take = holder.logs._take
    holder.logs._take = lambda body, frames: (calls.append(body.count), take(body, frames))[1]
    began_s = time.monotonic()
    for _ in range(20):
        end = client.log_append("tokens", [b"x"])
    appended_s = time.monotonic()
    assert client.log_protected("tokens", at_least=end, timeout_s=DEADLINE_S) == end
    assert len(calls) <= 2 + (appended_s - began_s) / 0.05
    assert sum(calls) == 20
    calls.clear()
    time.sleep(0.3)
    assert calls == []  # a log that does not change costs nothing


def test_waiting_for_protection_ends_at_its_deadline(three: SidecarGroup) -> None:
    three.adopt()
    client = three.clients["a"]
    end = write(client, [b"0"])
    assert client.log_protected("tokens", at_least=end + 1, timeout_s=0.1) == end


def test_a_copy_that_was_refused_once_is_completed_later(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.adopt()
    writer = three.clients["a"]
    writer.log_open("tokens")
    with monkeypatch.context() as patch:
        patch.setattr(three.sidecars["b"].room, "log_limit", lambda: 0)
        writer.log_append("tokens", [b"0"])
        errors = lambda: writer.status()["log_errors"].get("b", "")  # noqa: E731
        wait_until(lambda: "may hold 0" in errors(), "the copy is refused")
    writer.log_append("tokens", [b"1"])
    assert writer.log_protected("tokens", at_least=2, timeout_s=DEADLINE_S) == 2
    three.kill("a", wipe=True)
    assert three.clients["c"].log_read("tokens", node="a") == [b"0", b"1"]


def test_a_log_begun_anew_replaces_the_copy_of_the_one_that_was_lost(
    three: SidecarGroup,
) -> None:
    three.adopt()
    write(three.clients["a"], RECORDS)
    three.kill("a", wipe=True)
    three.start("a")
    three.adopt(generation=2)
    write(three.clients["a"], [b"anew"])
    three.kill("a", wipe=True)
    assert three.clients["c"].log_read("tokens", node="a") == [b"anew"]


def test_what_a_damaged_record_was_is_read_from_another_copy(five: SidecarGroup) -> None:
    five.adopt(parity=2)
    write(five.clients["a"], RECORDS)
    damage(five, "a", "a", record=3)
    assert five.clients["e"].log_read("tokens", node="a") == RECORDS
    assert five.clients["a"].log_read("tokens", node="a") == RECORDS
    damage(five, "b", "a", record=5)
    five.kill("a", wipe=True)
    assert five.clients["e"].log_read("tokens", node="a") == RECORDS
    damage(five, "c", "a", record=5)
    with pytest.raises(CorruptError, match="record 5 of log 'tokens' of node a is damaged"):
        five.clients["e"].log_read("tokens", node="a")


def test_a_record_damaged_before_it_was_copied_does_not_hold_up_the_others(
    five: SidecarGroup,
) -> None:
    five.adopt(parity=1)
    write(five.clients["a"], RECORDS)
    damage(five, "a", "a", record=3)
    order = ("a", "c", "b", "d", "e")
    world = five.adopt(parity=1, generation=2)
    moved = msgspec.structs.replace(world, generation=3, groups=(order,))
    for client in five.clients.values():
        client.adopt(moved, restore=None)
    end = len(RECORDS)
    assert five.clients["a"].log_protected("tokens", at_least=end, timeout_s=DEADLINE_S) == end
    found = list(five.sidecars["c"].logs._table["a", "tokens"].frames(0).records())
    assert [index for index, record in found if record is None] == [3]


# -- changes of the group ------------------------------------------------------------------------


def test_after_a_change_copies_are_made_anew_and_the_old_ones_let_go(five: SidecarGroup) -> None:
    world = five.adopt(parity=2)
    write(five.clients["a"], RECORDS)
    assert has_copies(five, "a") == {"a", "b", "c"}
    moved = msgspec.structs.replace(world, generation=2, groups=(("a", "d", "e", "b", "c"),))
    for client in five.clients.values():
        client.adopt(moved, restore=None)
    wait_until(lambda: has_copies(five, "a") == {"a", "d", "e"}, "the copies have moved")
    assert five.clients["b"].log_read("tokens", node="a") == RECORDS


def test_an_old_copy_stays_while_a_new_holder_does_not_take_it(
    five: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = five.adopt(parity=1)
    write(five.clients["a"], RECORDS)
    monkeypatch.setattr(five.sidecars["d"].room, "log_limit", lambda: 0)
    moved = msgspec.structs.replace(world, generation=2, groups=(("a", "d", "b", "c", "e"),))
    for client in five.clients.values():
        client.adopt(moved, restore=None)
    wait_until(lambda: bool(five.clients["a"].status()["log_errors"]), "d refuses")
    time.sleep(0.3)
    assert has_copies(five, "a") == {"a", "b"}
    assert five.clients["b"].status()["log_copies_unsettled"] == 1
    monkeypatch.undo()
    wait_until(lambda: has_copies(five, "a") == {"a", "d"}, "the copy has moved")


def settle(group: SidecarGroup) -> None:
    """Wait until every copy is where it belongs."""
    wait_until(
        lambda: all(s.logs._keeping.unsettled() == 0 for s in group.sidecars.values()),
        "copies are settled",
    )


@pytest.mark.parametrize("parity", [1, 2])
def test_the_log_of_a_lost_node_survives_losses_one_after_another(
    five: SidecarGroup, parity: int
) -> None:
    world = five.adopt(parity=parity)
    write(five.clients["a"], RECORDS)
    lost = [["a"], [holders_of(world, "a")[0].node]]
    for number, nodes in enumerate(lost):
        for node in nodes:
            five.kill(node, wipe=True)
        world = five.adopt(parity=parity, generation=2 + number)
        settle(five)
        group = world.parity_groups()[0]
        keepers = {peer.node for peer in keepers_of(world, "a", "tokens", among=group)}
        assert has_copies(five, "a") == keepers and len(keepers) == parity + 1
        for client in five.clients.values():
            assert client.log_read("tokens", node="a") == RECORDS
    five.kill(sorted(keepers)[0], wipe=True)
    assert next(iter(five.clients.values())).log_read("tokens", node="a") == RECORDS


def test_a_log_survives_all_the_losses_the_parity_covers_at_once(five: SidecarGroup) -> None:
    five.adopt(parity=2)
    write(five.clients["a"], RECORDS)
    five.kill("a", wipe=True)
    five.kill("b", wipe=True)
    five.adopt(parity=2, generation=2)
    settle(five)
    assert has_copies(five, "a") == {"c", "d", "e"}


def test_a_node_that_comes_back_empty_leaves_its_old_log_to_its_keepers(
    three: SidecarGroup,
) -> None:
    three.adopt()
    write(three.clients["a"], RECORDS)
    three.kill("a", wipe=True)
    three.start("a")
    three.adopt(generation=2)
    settle(three)
    assert has_copies(three, "a") == {"b", "c"}
    assert three.clients["a"].log_read("tokens", node="a") == RECORDS


# -- the end of a log ----------------------------------------------------------------------------


def test_a_dropped_log_is_gone_everywhere_and_does_not_come_back(five: SidecarGroup) -> None:
    five.adopt(parity=2)
    write(five.clients["a"], RECORDS)
    five.kill("a", wipe=True)
    five.kill("b", wipe=False)
    five.adopt(parity=1, generation=2)
    settle(five)
    five.clients["e"].log_drop("tokens", node="a")
    wait_until(lambda: not has_copies(five, "a"), "dropped everywhere")
    five.start("b")  # it was away, and has its copy still
    assert has_copies(five, "a") == {"b"}
    five.adopt(parity=1, generation=3)
    wait_until(lambda: not has_copies(five, "a"), "dropped there too")
    with pytest.raises(NotFoundError):
        five.clients["c"].log_read("tokens", node="a")


def test_a_worker_that_was_given_up_and_lives_begins_its_log_anew(three: SidecarGroup) -> None:
    three.adopt()
    client = three.clients["a"]
    write(client, RECORDS)
    three.clients["c"].log_drop("tokens", node="a")
    wait_until(lambda: not has_copies(three, "a"), "dropped everywhere")
    with pytest.raises(NotFoundError, match="open it first"):
        client.log_append("tokens", [b"x"])
    write(client, [b"anew"])
    assert three.clients["c"].log_read("tokens", node="a") == [b"anew"]
    assert has_copies(three, "a") == {"a", "b"}


# -- what is refused -----------------------------------------------------------------------------


def copy_message(**fields: Any) -> Any:
    message = LogCopy(
        node="b", name="tokens", base=0, at=0, count=1, birth=7, generation=2, owner=True
    )
    return unparse(msgspec.structs.replace(message, **fields))


def test_messages_that_no_honest_sidecar_sends_are_refused_and_counted(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.adopt(generation=2)
    client = Client(three.addresses()["a"], three.key)
    good = bytes(pack([b"x"], 0).data)
    with pytest.raises(FencedError):
        client.call("log_copy", copy_message(generation=1), [good])
    for fields in ({"node": "a"}, {"count": 0}, {"count": -1}, {"at": -1}, {"at": 1 << 70}):
        with pytest.raises(PeerError, match="does not describe a copy"):
            client.call("log_copy", copy_message(**fields), [good])
    for text in (b"", good[:-1], good + b"x", bytes([good[0] ^ 1]) + good[1:]):
        with pytest.raises(PeerError, match="send again"):
            client.call("log_copy", copy_message(), [text])
    monkeypatch.setattr(operations, "MAX_COPY_BYTES", 10)
    with pytest.raises(PeerError, match="send it in parts"):
        client.call("log_copy", copy_message(), [good])
    client.close()
    counters = three.clients["a"].status()["counters"]
    wanted = {"stale": 1, "malformed": 5, "damaged": 4, "oversized": 1}
    assert {name: counters[f"log_refused_{name}"] for name in wanted} == wanted
    assert not has_copies(three, "b")


def send(client: Client, records: list[bytes | None], **fields: Any) -> dict[str, Any]:
    message = copy_message(count=len(records), **fields)
    answer, _ = client.call("log_copy", message, [pack(records, message["at"]).data])
    return answer


def test_where_a_copy_differs_from_its_writers_log_the_writer_is_right(
    three: SidecarGroup,
) -> None:
    three.adopt(generation=2)
    client = Client(three.addresses()["a"], three.key)
    assert send(client, [b"0", b"1", b"2", b"3"])["end"] == 4
    assert send(client, [b"1", b"two"], at=1)["end"] == 3
    assert send(client, [b"0", None, b"two", b"3"])["end"] == 4  # a hole takes nothing away
    assert send(client, [b"9"], at=9)["end"] == 4  # nor is there a gap
    copy = three.sidecars["a"].logs._table["b", "tokens"]
    assert [r for _, r in copy.frames(0).records()] == [b"0", b"1", b"two", b"3"]
    client.close()


def test_of_two_logs_of_one_name_the_later_stays_unless_the_writer_says_otherwise(
    three: SidecarGroup,
) -> None:
    three.adopt(generation=2)
    client = Client(three.addresses()["a"], three.key)
    send(client, [b"of 7"], owner=False)
    assert send(client, [b"of 5"], birth=5, owner=False)["birth"] == 7
    assert send(client, [b"of 9"], birth=9, owner=False)["birth"] == 9
    assert send(client, [b"of 5"], birth=5)["birth"] == 5
    assert len(list(three.sidecars["a"].core.arena.directory.glob("*.log"))) == 1
    client.close()


# -- where copies go -----------------------------------------------------------------------------


def spread(*domains: str, parity: int) -> SnapshotWorld:
    names = "abcdefgh"[: len(domains)]
    world = make_world(dict.fromkeys(names, "tcp://x"), parity=parity)
    peers = tuple(
        SidecarPeer(node=peer.node, address=peer.address, domain=domain)
        for peer, domain in zip(world.peers, domains, strict=True)
    )
    return msgspec.structs.replace(world, peers=peers)


def test_copies_go_to_other_failure_domains_first() -> None:
    world = spread("p", "p", "q", "q", "r", parity=3)
    assert [peer.node for peer in holders_of(world, "a")] == ["c", "e", "b"]
    assert [peer.node for peer in holders_of(world, "d")] == ["e", "a", "b"]
    inside = spread("row/p", "row/p", "row/q", "r", parity=3)
    assert [peer.node for peer in holders_of(inside, "a")] == ["d", "c", "b"]


def test_copies_stay_in_the_group_of_their_writer() -> None:
    world = msgspec.structs.replace(
        spread(*[""] * 6, parity=2), groups=(("a", "c", "e"), ("b", "d", "f"))
    )
    assert [peer.node for peer in holders_of(world, "c")] == ["e", "a"]
    assert [peer.node for peer in holders_of(world, "f")] == ["b", "d"]
