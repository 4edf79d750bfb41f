"""The status of a sea from its files."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from doubles.written_seas import WrittenSea
from rich.console import Console

from holdfast.elastic.islands.messages import LineFigures
from holdfast.tools.islands.glance import listen, look
from holdfast.tools.islands.status import SeaStatus, status
from holdfast.tools.islands.tables import sea_view


def shown(found: SeaStatus) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(sea_view(found))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def sea(tmp_path: Path) -> WrittenSea:
    made = WrittenSea(tmp_path / "sea")
    made.merge()
    return made


def status_of(sea: WrittenSea, *stirring: str) -> SeaStatus:
    """Return the status while the named islands give a sign of life."""
    before = look(sea.store)
    for island in stirring:
        sea.stir(island)
    return status("s3://b/sea", before, listen(sea.store, before, for_s=0.01))


def test_a_merge_waits_for_the_island_without_a_work(sea: WrittenSea) -> None:
    work = sea.publish("oslo")
    found = status_of(sea, "oslo", "lyon")
    assert (found.tide, found.portion, found.waits_for) == (1, 1, ("lyon",))
    assert [each.work_bytes for each in found.members] == [None, work.nbytes]
    assert "2 islands, 1 merge; the next is of portion 1 and waits for lyon" in shown(found)


def test_an_island_whose_sign_of_life_stays_is_not_heard(sea: WrittenSea) -> None:
    sea.stir("lyon")
    found = status_of(sea, "oslo")
    assert [each.heard_s is None for each in found.members] == [True, False]
    lines = shown(found).splitlines()
    assert any("lyon" in line and "not in 0." in line for line in lines)
    assert any("oslo" in line and "within 0." in line for line in lines)
    for said in ("1,200", "2.5 s", "3.0 MiB"):
        assert said in next(line for line in lines if line.strip().startswith("oslo"))


def test_the_bytes_of_a_tide_are_those_of_the_largest_payload(sea: WrittenSea) -> None:
    works = [sea.publish("lyon").nbytes]
    sea.merge()
    works.append(sea.publish("lyon").nbytes)
    found = status_of(sea)
    assert (found.sent_bytes, found.received_bytes) == (max(works), max(works))
    assert (found.parameters, found.elements) == (3, 840)


def test_seconds_of_a_tide_follow_from_the_merges_between_two_looks(sea: WrittenSea) -> None:
    before = look(sea.store)
    sea.merge()
    found = status("sea", before, listen(sea.store, before, for_s=0.01))
    assert found.tides_seen == 1
    assert found.tide_s == found.listened_s
    assert "s while this command listened: the line of an island carries" in shown(found)


def test_a_line_is_shown_with_what_tides_need_of_it(sea: WrittenSea) -> None:
    sea.stir("lyon", line=LineFigures(uplink=1000, up=400.0, down=5e6))
    sea.stir("oslo")
    lyon, oslo = status_of(sea).members
    assert lyon.up.tide_s == 2 * 0.5
    assert lyon.up.needed == lyon.up.tide_bytes / 1.0
    assert (lyon.up.declared, lyon.up.given) == (1000, 400.0)
    assert (lyon.down.declared, lyon.down.given) == (None, 5e6)
    assert (lyon.up.fits, lyon.down.fits) == (False, True)
    assert (oslo.up.given, oslo.up.fits) == (None, True)
    text = " ".join(shown(status_of(sea)).split())
    assert f"lyon: a tide of {lyon.up.tide_bytes} B up takes" in text
    assert "line of 0.0032 Mbit/s, and one comes every 1.0 s: training waits for it" in text
    assert "oslo: a tide" not in text


def test_an_island_without_a_sign_of_life_has_no_line(sea: WrittenSea) -> None:
    lyon, _ = status_of(sea).members
    assert (lyon.up.needed, lyon.up.given, lyon.up.fits) == (None, None, True)


def test_islands_that_left_are_told_with_the_reason(sea: WrittenSea) -> None:
    sea.leave("lyon")
    sea.leave("oslo")
    found = status_of(sea)
    assert (found.members, found.waits_for) == ((), ())
    text = shown(found)
    assert "all have left" in text
    assert "oslo left: its run is over" in text
