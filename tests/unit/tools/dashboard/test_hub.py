"""Pages get what is newer than what they have, and nothing is kept for a slow one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from large_run import BEGIN_S, step, training, write

from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.dashboard.hub import Board, Hub
from holdfast.tools.dashboard.sections import FULL_NODES, sections
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.follow import Follower


def since(board: Board, version: int) -> tuple[int, dict[str, Any]]:
    now, data = board.since(version)
    return now, msgspec.json.decode(data)


def test_a_page_gets_only_what_changed() -> None:
    board = Board()
    board.update({"a": b"1", "b": b"2"}, whole=True)
    version, all_of_it = since(board, 0)
    assert all_of_it == {"a": 1, "b": 2}
    board.update({"a": b"1", "b": b"3"}, whole=True)
    assert since(board, version) == (2, {"b": 3})


def test_what_is_gone_is_null() -> None:
    board = Board()
    board.update({"node/a": b"1", "node/b": b"2"}, whole=True)
    board.update({"node/a": b"1"}, whole=True)
    assert since(board, 1)[1] == {"node/b": None}
    board.update({"node/a": b"1", "node/b": b"4"}, whole=True)
    assert since(board, 2)[1] == {"node/b": 4}


def test_a_slow_page_skips_what_lies_between() -> None:
    board = Board()
    for number in range(1000):
        board.update({"a": b"%d" % number}, whole=True)
    assert since(board, 1) == (1000, {"a": 999})


def test_a_thousand_nodes_that_train_change_nothing_of_their_own() -> None:
    fold = Fold()
    fold.apply(training(1000, steps=2, ranks=1000))
    before = dict(sections(fold.view(now_s=fold.last_s), extra={}))
    fold.apply(step(3, 1, at_s=BEGIN_S + 12, rank=rank) for rank in range(1000))
    after = dict(sections(fold.view(now_s=fold.last_s), extra={}))
    changed = {name for name in after if after[name] != before[name]}
    assert not any(name.startswith("node/") for name in changed)
    assert sum(map(len, after.values())) < 512 << 10
    assert sum(len(after[name]) for name in changed) < 64 << 10


def test_few_nodes_are_told_in_full() -> None:
    fold = Fold()
    fold.apply(training(FULL_NODES, steps=2))
    found = dict(sections(fold.view(now_s=fold.last_s), extra={}))
    assert msgspec.json.decode(found["node/node0"])["seats"][0]["seat"] == "trainer/0"


def test_a_hub_follows_the_run(tmp_path: Path) -> None:
    write(tmp_path, training(2, steps=5))
    hub = Hub(Follower(tmp_path))
    hub.start()
    try:
        assert hub.view.step == 5
        writer = EventWriter(events_file(tmp_path, "node0"), node="node0")
        writer.write(step(6, 1, at_s=BEGIN_S + 20), source="worker")
        writer.close()
        hub.follower.read()
        hub.refresh()
        assert hub.view.step == 6
    finally:
        hub.close()
