"""Histories read back what the hooks write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from holdfast.tools import chaos
from holdfast.tools.chaos.hooks import ATTEMPT, HISTORY, digest
from holdfast.tools.chaos.judging.history import HistoryError, read
from holdfast.tools.cli import EXIT_USAGE, main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(HISTORY, str(tmp_path / "history"))
    monkeypatch.setattr("holdfast.tools.chaos.hooks._files", {})
    return tmp_path / "history"


def test_without_a_history_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HISTORY, raising=False)
    chaos.step(1)
    chaos.samples(1, iter(()))
    chaos.state_hash(1, {"untouched": object()})


def test_steps_samples_and_state_are_read_back(folder: Path) -> None:
    chaos.samples(4, range(3), epoch=1, rank=2)
    chaos.step(4, rank=2)
    chaos.state_hash(4, "abc", rank=2)
    history = read(folder)
    assert [(c.step, c.rank, c.attempt) for c in history.commits] == [(4, 2, 0)]
    assert [(c.ids, c.epoch) for c in history.consumed] == [((0, 1, 2), 1)]
    assert history.states[0].digest == "abc"


def test_rank_and_attempt_are_the_environments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    chaos.step(0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    chaos.step(1)
    monkeypatch.setenv(ATTEMPT, "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    chaos.step(2)
    commits = read(folder).commits
    assert {commit.rank for commit in commits} == {3}
    attempts = [commit.attempt for commit in commits]
    assert attempts == sorted(set(attempts))


def test_a_forked_process_has_a_file_of_its_own(folder: Path) -> None:
    chaos.step(0)
    child = os.fork()
    if child == 0:
        chaos.step(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(folder.iterdir())) == 2
    assert len(read(folder).commits) == 2


def test_a_line_that_a_death_cut_off_is_passed_over(folder: Path) -> None:
    chaos.step(0)
    (file,) = folder.iterdir()
    with file.open("a") as torn:
        torn.write('{"t": 1.0, "kind": "st')
    assert len(read(folder).commits) == 1


def test_any_other_bad_line_is_named(folder: Path) -> None:
    chaos.step(0)
    (file,) = folder.iterdir()
    with file.open("a") as bad:
        bad.write("nonsense\n")
    with pytest.raises(HistoryError, match=r"history-.*, line 2"):
        read(folder)


def test_a_folder_without_a_history_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"call holdfast\.chaos\.step"):
        read(tmp_path)


def test_a_folder_that_is_not_there_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "check", str(tmp_path / "nowhere")]) == EXIT_USAGE
    assert "nowhere: no such folder; check the path" in " ".join(capsys.readouterr().err.split())


def test_a_digest_has_every_bit_of_a_state() -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "moments": [torch.zeros(2)], "step": 3}
    known = digest(state)
    assert digest({**state, "w": state["w"].clone()}) == known  # type: ignore[attr-defined]
    for other in (
        {**state, "step": 4},
        {**state, "w": torch.arange(6.0).reshape(3, 2)},
        {**state, "w": torch.nextafter(torch.arange(6.0), torch.tensor(9.0)).reshape(2, 3)},
        {**state, "moments": [torch.zeros(2, dtype=torch.float64)]},
        {"v": state["w"], "moments": state["moments"], "step": 3},
    ):
        assert digest(other) != known
    assert digest({"scalar": torch.tensor(1.0)}) != digest({"scalar": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="/model: a object has no digest"):
        digest({"model": object()})
