"""The forms of a time that `--since` takes."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from holdfast.tools.logs.since import parse_since

NOON = datetime(2026, 1, 31, 12, 0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("90s", NOON - timedelta(seconds=90)),
        ("10m", NOON - timedelta(minutes=10)),
        ("1.5h", NOON - timedelta(minutes=90)),
        ("2d", NOON - timedelta(days=2)),
        ("9:30", datetime(2026, 1, 31, 9, 30)),
        ("11:59:30.25", datetime(2026, 1, 31, 11, 59, 30, 250_000)),
        ("14:30", datetime(2026, 1, 30, 14, 30)),
        ("2026-01-30", datetime(2026, 1, 30)),
        ("2026-01-30T08:15", datetime(2026, 1, 30, 8, 15)),
        ("1769800000.5", datetime.fromtimestamp(1769800000.5)),
        ("2026-01-30T08:15:00.250Z", datetime.fromisoformat("2026-01-30T08:15:00.250+00:00")),
    ],
)
def test_a_time_in_any_form(text: str, found: datetime) -> None:
    assert parse_since(text, now_s=NOON.timestamp()) == pytest.approx(found.timestamp())


@pytest.mark.parametrize("text", ["", "soon", "10", "10y", "25:00", "12:61", "2026-13-01", "-5m"])
def test_what_is_no_time_is_told_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="is no time: give how long ago"):
        parse_since(text, now_s=NOON.timestamp())
