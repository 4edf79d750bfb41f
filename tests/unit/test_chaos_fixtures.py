"""What the fixtures of the pytest plug-in make of a marker, and of what a job told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from chaos_runs import plain_events, write_history

from holdfast.elastic.errors import ConfigError
from holdfast.tools.chaos.fixtures.cluster import Cluster
from holdfast.tools.chaos.fixtures.judging import JobHistory
from holdfast.tools.chaos.fixtures.options import Options, options_of
from holdfast.tools.chaos.judging.checker import Verdict
from holdfast.tools.chaos.real.jobs import Place


def test_nodes_are_named_and_each_has_the_workers() -> None:
    options = options_of((), {"nodes": 3, "trainers": 2})
    assert options.slots() == {name: {"trainer": 2} for name in "abc"}
    assert list(Options(nodes=28).slots())[25:] == ["z", "n26", "n27"]
    own = {"left": {"trainer": 1}, "right": {"trainer": 1, "rollout": 2}}
    assert options_of((), {"nodes": own}).slots() == own


def test_the_seed_of_the_command_line_comes_before_the_markers() -> None:
    assert options_of((), {"seed": 3}).seed == 3
    assert options_of((), {"seed": 3}, seed=9).seed == 9


@pytest.mark.parametrize(
    ("args", "fields", "said"),
    [
        ((3,), {}, "by its name"),
        ((), {"node": 3}, "unknown field `node`"),
        ((), {"nodes": "3"}, "nodes"),
        ((), {"nodes": 0}, "give 1 or more"),
        ((), {"kinds": ("kill", "meteor")}, "no such kinds of faults: meteor"),
    ],
)
def test_a_marker_that_cannot_be_is_refused(
    args: tuple[object, ...], fields: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        options_of(args, fields)


@dataclass
class Ended:
    """Stands for a cluster whose job has ended."""

    folder: Path
    verdict: Verdict | None = None
    waits: list[None] = field(default_factory=list)

    @property
    def running(self) -> Ended:
        return self

    @property
    def place(self) -> Place:
        return Place(folder=self.folder, history=self.folder / "history", work=self.folder)

    def wait(self) -> None:
        self.waits.append(None)


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    write_history(tmp_path / "history", plain_events())
    return Ended(tmp_path)


def history_of(ended: Ended) -> JobHistory:
    return JobHistory(cast("Cluster", ended))


def test_the_history_waits_for_the_end_once(ended: Ended) -> None:
    history = history_of(ended)
    assert history.steps == tuple(range(10))
    assert history.samples[5] == (20, 21, 22, 23)
    assert len(ended.waits) == 1


def test_every_broken_promise_is_in_the_error(ended: Ended, tmp_path: Path) -> None:
    calm = [event for event in plain_events() if event["step"] < 5]
    calm += [{**event, "attempt": 0, "step": event["step"] + 5} for event in calm]
    write_history(tmp_path / "calm", sorted(calm, key=lambda event: float(event["t"])))
    with pytest.raises(AssertionError) as raised:
        history_of(ended).check(against=tmp_path / "calm", undone_most=1)
    said = str(raised.value)
    assert "bounded loss: 2 steps of attempt 0 were undone, 5 to 6; 1 may be" in said
    assert "samples of the reference: 5 steps trained on other samples" in said
    assert "10 steps survive of 12 executed in 2 attempts" in said
    assert f"holdfast chaos report {tmp_path}" in said
    assert ended.verdict is not None and len(ended.verdict.violations) == 2


def test_a_history_that_holds_gives_its_verdict(ended: Ended) -> None:
    verdict = history_of(ended).check(undone_most=2, dense=True)
    assert verdict.held
    assert "no sample skipped" in verdict.checked
    assert history_of(ended).verdict.undone == 2
