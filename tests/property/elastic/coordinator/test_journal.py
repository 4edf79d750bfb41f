"""The journal of a table, after any operations, leads to the same table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.coordinator.journal import Journal, TableChange
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.errors import LeaseExpiredError

KEYS = st.sampled_from(["r/a", "r/b", "s/a"])
LEASES = st.integers(1, 4)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.text(max_size=3), st.none() | LEASES),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("grant"), st.floats(0.1, 3.0)),
        st.tuples(st.just("revoke"), LEASES),
        st.tuples(st.just("expire")),
        st.tuples(st.just("shorten")),
    ),
    max_size=25,
)


def _do(table: KeyValueTable, journal: Journal, action: tuple[Any, ...], now_s: float) -> None:
    match action:
        case ("put", key, value, lease):
            table.put(key, value, lease=lease)
        case ("delete", key):
            table.delete(key)
        case ("grant", ttl_s):
            table.grant(ttl_s, now_s=now_s)
        case ("revoke", lease):
            table.revoke(lease)
        case ("expire",):
            table.expire(now_s)
        case ("shorten",):
            journal.rewrite(table.changes())


def _replayed(changes: list[TableChange]) -> KeyValueTable:
    table = KeyValueTable()
    table.replay(changes, now_s=100.0)
    return table


@settings(deadline=None)  # it writes files
@given(ACTIONS)
def test_a_table_from_its_journal_is_the_table(actions: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        table, journal = KeyValueTable(), Journal(path)
        table.write_down = journal.append
        for turn, action in enumerate(actions):
            try:
                _do(table, journal, action, float(turn))
            except LeaseExpiredError:
                continue
        journal.close()
        again = Journal(path)
        same = _replayed(again.load())
        again.close()
        table.write_down = lambda change: None
    assert same.changes() == table.changes()
    assert same.range("") == table.range("")
    for after in range(table.revision + 1):
        events = same.events("r/", after=after)
        assert events == table.events("r/", after=after) or events[0].kind == "reset"
    assert same.grant(1.0, now_s=0.0) == table.grant(1.0, now_s=0.0)
