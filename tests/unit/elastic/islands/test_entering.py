"""The way of an island without a state into the sea."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doubles import seas

from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import ConfigError, SeaError
from holdfast.elastic.islands.commands import (
    AdoptMerge,
    AwaitNews,
    Command,
    EnterAnew,
    GoOn,
    LoadWeights,
)
from holdfast.elastic.islands.entering import Entrance, returning
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Given, Sign
from holdfast.elastic.sea.records import Left, Parameter
from holdfast.elastic.sea.settings import Islands

ISLANDS = Islands(name="a", meet="sea", every=4, portions=2, overlap=1, patience_s=80)
PARAMETERS = (Parameter(name="weight", shape=(2, 3)), Parameter(name="bias", shape=(3,)))


class Newcomer:
    """An island on its way in, with a clock that the test moves."""

    def __init__(
        self,
        folder: Path,
        name: str = "a",
        *,
        first: object = "first",
        run: str = "r",
        apart: int = 64,
    ) -> None:
        store, self.now_s = LocalStore(folder), 0.0
        self.logbook = SeaLogbook(store, island=name, apart=apart)
        self.mailbox = Mailbox(store)
        self.entrance = Entrance(
            self.logbook,
            self.mailbox,
            replace(ISLANDS, name=name),
            parameters=PARAMETERS,
            first=seas.digest(first),
            weight=32,
            run=run,
            clock=lambda: self.now_s,
        )

    def says(self) -> Command:
        """Return the next command that is not to wait, or the tenth."""
        for _ in range(10):
            said, _ = self.entrance.next()
            if not isinstance(said, AwaitNews):
                break
        return said


def _merged(newcomer: Newcomer, *names: str) -> None:
    logbook = newcomer.logbook
    logbook.poll()
    works = (seas.work(logbook.view, name) for name in names)
    logbook.append(seas.merged(logbook.view, *works))


def test_the_first_island_founds_and_others_with_its_weights_join(tmp_path: Path) -> None:
    assert Newcomer(tmp_path).says() == GoOn(lineage=1)
    other = Newcomer(tmp_path, "b")
    assert other.says() == GoOn(lineage=2)
    assert list(other.logbook.view.members) == ["a", "b"]
    assert other.logbook.view.weights == {"a": 32, "b": 32}


def test_other_weights_or_a_merge_need_the_weights_of_a_member(tmp_path: Path) -> None:
    first = Newcomer(tmp_path)
    first.says()
    late = Newcomer(tmp_path, "b", first="other")
    assert late.says() == AwaitNews()
    _merged(first, "a")
    (request,) = first.mailbox.asked()
    first.mailbox.give(request, Given(by="a", tide=1, bases=(1, 0)))
    said = late.says()
    assert isinstance(said, LoadWeights)
    assert (said.tide, said.bases, said.root.endswith(f"{request.id}/a")) == (1, (1, 0), True)
    assert late.says() == GoOn(lineage=3, place=late.logbook.place(1))
    assert late.mailbox.asked() == []


def test_an_island_that_lost_its_state_enters_again_under_its_name(tmp_path: Path) -> None:
    first = Newcomer(tmp_path)
    first.says()
    Newcomer(tmp_path, "b").says()
    _merged(first, "a", "b")
    again = Newcomer(tmp_path, "b")
    again.says()
    assert "b" in again.logbook.view.members, "others wait for it meanwhile"
    first.mailbox.give(first.mailbox.asked()[0], Given(by="a", tide=1, bases=(1, 0)))
    assert isinstance(again.says(), LoadWeights)
    said = again.says()
    lineage = again.logbook.view.members["b"].joined
    assert said == GoOn(lineage=lineage, place=again.logbook.place(1))
    assert again.logbook.left == "lost"


def test_weights_that_are_older_than_the_place_of_the_begin_catch_up(tmp_path: Path) -> None:
    """Their giver was late for a quorum; so the records since then are read after all."""
    first = Newcomer(tmp_path, apart=2)
    first.says()
    for _ in range(4):
        _merged(first, "a")
    late = Newcomer(tmp_path, "b")
    assert late.says() == AwaitNews()
    assert 1 not in late.logbook.merged
    first.mailbox.give(first.mailbox.asked()[0], Given(by="a", tide=1, bases=(1, 0)))
    assert isinstance(late.says(), LoadWeights)
    late.mailbox.payload = lambda _island, _digest: b""  # type: ignore[method-assign]
    said = [late.says() for _ in range(3)]
    assert [each.tide for each in said if isinstance(each, AdoptMerge)] == [1, 2, 3]
    assert isinstance(late.says(), GoOn)


def test_a_name_that_lives_elsewhere_is_refused(tmp_path: Path) -> None:
    first = Newcomer(tmp_path, run="one")
    first.says()
    second = Newcomer(tmp_path, run="two")
    first.mailbox.show("a", Sign(island="a", run="one", number=1, needs=0))
    assert second.says() == AwaitNews()
    first.mailbox.show("a", Sign(island="a", run="one", number=2, needs=0))
    with pytest.raises(ConfigError, match="another run is the island 'a'"):
        second.says()


def test_a_name_that_gives_no_sign_any_more_is_free(tmp_path: Path) -> None:
    first = Newcomer(tmp_path, run="one")
    first.says()
    first.mailbox.show("a", Sign(island="a", run="one", number=1, needs=0))
    second = Newcomer(tmp_path, run="two")
    assert second.says() == AwaitNews()
    second.now_s += 60
    assert second.says() == GoOn(lineage=3)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Newcomer(tmp_path).says()
    other = Newcomer(tmp_path, "b")
    other.entrance._islands = replace(ISLANDS, name="b", bits=8)
    with pytest.raises(ConfigError, match="bits is 8 here and 4 in the sea"):
        other.says()


def test_nobody_heals_a_sea_that_has_no_island(tmp_path: Path) -> None:
    first = Newcomer(tmp_path)
    first.says()
    _merged(first, "a")
    first.logbook.append(Left(number=first.logbook.view.length, island="a", why="done"))
    with pytest.raises(SeaError, match="no island any more that could give"):
        Newcomer(tmp_path, "b").says()


def test_islands_that_do_not_answer_are_waited_for_as_long_as_patience(tmp_path: Path) -> None:
    first = Newcomer(tmp_path)
    first.says()
    _merged(first, "a")
    late = Newcomer(tmp_path, "b")
    assert late.says() == AwaitNews()
    late.now_s = 79
    assert late.says() == AwaitNews()
    late.now_s = 200
    with pytest.raises(SeaError, match="none of a answers"):
        late.says()


def test_an_island_that_asks_shows_that_it_waits_and_asks_anew_if_it_was_given_up(
    tmp_path: Path,
) -> None:
    first = Newcomer(tmp_path)
    first.says()
    late = Newcomer(tmp_path, "b", first="other")
    late.says()
    (request,) = late.mailbox.asked()
    late.now_s += 5
    late.says()
    (again,) = late.mailbox.asked()
    assert (again.id, again.beat) == (request.id, request.beat + 1)
    first.mailbox.close_request(again)
    late.now_s += 5
    late.says()
    (anew,) = late.mailbox.asked()
    assert anew.id != request.id


def test_a_run_whose_state_is_from_before_it_entered_anew_does_so_again(tmp_path: Path) -> None:
    """So it is after its loss guard went back; another run that took the name is refused later."""
    newcomer = Newcomer(tmp_path)
    assert newcomer.says() == GoOn(lineage=1)
    logbook = newcomer.logbook
    logbook.append(Left(number=2, island="a", why="lost"))
    assert Newcomer(tmp_path).says() == GoOn(lineage=3)
    logbook.poll()

    def goes_on(lineage: int, run: str) -> Command:
        sign = Sign(island="a", run=run, number=1, needs=0)
        return returning(logbook, ISLANDS, lineage=lineage, run="r", sign=lambda: sign)

    assert goes_on(3, "r") == goes_on(3, "other") == GoOn()
    assert goes_on(1, "r") == EnterAnew(keeps=True)
    assert goes_on(1, "other") == GoOn()
    with pytest.raises(SeaError, match="belongs to another sea"):
        goes_on(4, "r")
