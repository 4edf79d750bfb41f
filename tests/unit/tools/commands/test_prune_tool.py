"""`holdfast prune` removes steps that no rule keeps, stores pins, reads no other host's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.checkpoints import write_checkpoint

from holdfast import ckpt
from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.local import LocalStore
from holdfast.tools.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        arrays = {"x": (np.full(5, float(step)), "float64")}
        write_checkpoint(tmp_path, arrays, step=step, values={"loss": abs(step - 2) + 0.5})
    return tmp_path


def prune(root: Path, *words: str) -> int:
    return main(["prune", str(root), *words])


def test_what_goes_and_why_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(root, "--keep-last", "1", "--keep-best", "loss:min", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "would go" in said and "lowest loss (0.5)" in said and "no rule keeps it" in said
    assert committed_steps(root) == [1, 2, 3, 4]
    assert prune(root, "--keep-last", "1", "--keep-best", "loss:min") == 0
    assert "removed 2 checkpoints: 1, 3" in capsys.readouterr().out
    assert committed_steps(root) == [2, 4]


def test_the_verdicts_are_there_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(root, "--keep-last", "2", "--keep-every", "2", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["removed"] == [1]
    assert found["bytes"] > 0
    assert [step["keep"] for step in found["steps"]] == [False, True, True, True]


def test_pins_last_until_they_are_taken_away(root: Path) -> None:
    assert prune(root, "--keep-last", "1", "--pin", "1", "2") == 0
    assert committed_steps(root) == [1, 2, 4]
    assert prune(root, "--keep-last", "1") == 0
    assert committed_steps(root) == [1, 2, 4]
    assert prune(root, "--keep-last", "1", "--unpin", "1") == 0
    assert committed_steps(root) == [2, 4]


def test_a_dry_run_pins_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(root, "--keep-last", "1", "--pin", "1", "--dry-run") == 0
    assert "pinned" in capsys.readouterr().out
    assert pins.load(LocalStore(root)) == pins.Retention()


def test_pinning_what_is_not_there_removes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(root, "--keep-last", "1", "--pin", "9") == 1
    assert "no checkpoint of step 9 to pin; steps there: 1, 2, 3, 4" in capsys.readouterr().err
    assert committed_steps(root) == [1, 2, 3, 4]


def test_a_limit_in_steps_needs_no_clock(root: Path) -> None:
    assert prune(root, "--keep-last", "4", "--ttl", "1steps") == 0
    assert committed_steps(root) == [3, 4]


def test_a_limit_in_time_counts_from_the_first_look_of_this_host(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("holdfast.tools.commands.prune.time.time", lambda: now[0])
    assert prune(root, "--keep-last", "4", "--ttl", "1h") == 0
    assert committed_steps(root) == [1, 2, 3, 4]
    now[0] += 3700
    monkeypatch.setattr("holdfast.tools.commands.prune.socket.gethostname", lambda: "another")
    assert prune(root, "--keep-last", "4", "--ttl", "1h") == 0
    assert committed_steps(root) == [1, 2, 3, 4]
    monkeypatch.undo()
    monkeypatch.setattr("holdfast.tools.commands.prune.time.time", lambda: now[0])
    assert prune(root, "--keep-last", "4", "--ttl", "1h") == 0
    assert committed_steps(root) == [4]


@pytest.mark.parametrize(
    "words",
    [["--keep-last", "0"], ["--keep-best", "loss"], ["--ttl", "soon"], ["--keep-every", "x"]],
)
def test_a_wrong_command_line_is_2(root: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prune(root, *words)
    assert ended.value.code == 2
    assert committed_steps(root) == [1, 2, 3, 4]


class Crowded(LocalStore):
    """A root where someone else changes the record each time before we do."""

    def __init__(self, root: Path, *, times: int) -> None:
        super().__init__(root)
        self.times = times

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        if self.times > 0:
            self.times -= 1
            known = pins.load(LocalStore(self.root)).pins
            others = sorted({*known, self.times + 1} if self.times < 2 else known)
            record = {"pins": others, "seen": {"other": {"1": self.times}}}
            self.write(name, [json.dumps(record).encode()])
        return super().replace(name, data, expected=expected)


def test_pins_set_at_once_by_several_hosts_all_last(root: Path) -> None:
    store = Crowded(root, times=2)
    found = pins.update(store, there=[1, 2, 3, 4], pin=[4], host="h", now_s=1.0)
    assert found.pins == (1, 2, 4)


def test_an_endless_race_is_given_up(root: Path) -> None:
    with pytest.raises(StoreError, match="try again"):
        pins.update(Crowded(root, times=99), there=[1, 2, 3, 4], pin=[4], host="h", now_s=1.0)


def test_a_clock_set_back_makes_nothing_old() -> None:
    known = pins.Retention(seen={"h": {1: 500.0}})
    assert known.ages(host="h", now_s=100.0) == {1: 0.0}
    later = known.after(there=[1], pin=[], unpin=[], host="h", now_s=100.0)
    assert later.seen == {"h": {1: 100.0}}


def test_steps_that_are_gone_are_forgotten() -> None:
    known = pins.Retention(pins=(1, 2), seen={"h": {1: 5.0, 2: 6.0}, "other": {1: 1.0}})
    later = known.after(there=[2], pin=[], unpin=[], host="h", now_s=9.0)
    assert later == pins.Retention(pins=(2,), seen={"h": {2: 6.0}})


def test_a_damaged_record_is_named_and_nothing_goes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / pins.FILE).write_text("{")
    with pytest.raises(CorruptError, match="remove it to forget all pins"):
        pins.load(LocalStore(root))
    assert prune(root, "--keep-last", "1") == 1
    assert str(root / pins.FILE) in capsys.readouterr().err
    assert committed_steps(root) == [1, 2, 3, 4]


def test_an_absent_step_cannot_be_pinned(root: Path) -> None:
    with pytest.raises(NotFoundError, match="step 7"):
        pins.update(LocalStore(root), there=[1], pin=[7], host="h", now_s=1.0)


def test_a_metric_that_no_step_has_removes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(root, "--keep-last", "1", "--keep-best", "los:min") == 1
    assert "--keep-best los: no step has a number of that name" in capsys.readouterr().err
    assert committed_steps(root) == [1, 2, 3, 4]


def test_a_dry_run_refuses_a_pin_of_no_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(root, "--pin", "9", "--dry-run") == 1
    assert "no checkpoint of step 9 to pin" in capsys.readouterr().err


def test_one_step_is_not_a_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(root / "step-000000000002") == 2
    assert f"is one step; give the root {root}" in capsys.readouterr().err


def test_a_pack_that_is_still_referred_to_is_not_counted_as_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"frozen": torch.ones(50_000), "adapter": torch.zeros(3)}
    ckpt.save(tmp_path, state, step=1)
    ckpt.save(tmp_path, state | {"adapter": torch.ones(3)}, step=2, base=1)
    assert prune(tmp_path, "--keep-last", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] < 50_000
