"""The decorator refuses invalid settings at once and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast import ckpt
from holdfast.ckpt.checkpoints import redirects
from holdfast.elastic.config import Checkpoints, Settings, Snapshots
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.generations import _on_this_machine, resilient
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loop.trace.records import TRACE_ENV, TraceSettings


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"snapshots": "12GiB"}, r"snapshots='12GiB'\): give snapshots=holdfast\.Snapshots"),
        ({"snapshots": 0}, r"snapshots=0\): give"),
        ({"snapshots": {"every": 2}}, r"snapshots={'every': 2}\): give"),
        ({"mesh": ""}, r"resilient\(mesh=''\): give"),
        ({"checkpoint": ""}, r"Checkpoints\(root=''\)"),
        ({"checkpoint": Path("runs/x")}, r"checkpoint=.*give checkpoint=holdfast\.Checkpoints"),
        ({"exact": 1}, r"exact=1\): give True"),
        ({"exact": "float16"}, r"exact='float16'\): give True"),
        ({"timeouts": 3.0}, r"timeouts=3.0\): give"),
        ({"loss_guard": True}, r"loss_guard=True\): give"),
        ({"worker_info": {"a": 1}}, r"resilient\(worker_info={'a': 1}\): give a function"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(argument: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resilient(**argument)


@pytest.mark.parametrize("old", ["announce", "parity", "keep", "snapshot_every", "disk"])
def test_old_spellings_are_gone(old: str) -> None:
    with pytest.raises(TypeError, match=old):
        resilient(**{old: 1})


def test_a_string_names_the_root_of_checkpoints() -> None:
    assert callable(resilient(checkpoint="s3://bucket/run", snapshots=Snapshots(keep=1)))


def test_without_settings_it_needs_no_parentheses() -> None:
    @resilient
    def train(run: Run, words: str) -> str:
        """Train."""
        return words

    assert (train.__name__, train.__doc__) == ("train", "Train.")


@pytest.mark.parametrize("given", ["runs/x", Snapshots(), 3])
def test_a_setting_without_a_name_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"write @resilient above .* by name, as @resilient\(ch"):
        resilient(given)


def _target(root: str, home: Path) -> Path:
    """Return the root to which a loop with the checkpoint ``root`` writes."""
    target = _on_this_machine(Settings(checkpoint=Checkpoints(root)), home=home).checkpoint
    assert target is not None
    return Path(target.root)


def test_a_script_that_is_checked_loads_what_its_loops_wrote_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redirects, "_instead", {})
    monkeypatch.chdir(tmp_path)
    assert _target("runs/a", tmp_path) == tmp_path / "runs/a"
    order = TraceSettings(folder="trace", steps=1, roots=str(tmp_path / "apart"))
    monkeypatch.setenv(TRACE_ENV, msgspec.json.encode(order).decode())
    for root in ("runs/a", "runs-a", "s3://bucket/a"):
        resilient(checkpoint=root)
    targets = [_target(root, tmp_path) for root in ("runs/a", "runs-a", "s3://bucket/a")]
    assert {target.parent for target in targets} == {tmp_path / "apart"}
    assert len(set(targets)) == 3

    ckpt.save(targets[0], {"w": torch.ones(2)}, step=1)
    found = {"w": torch.zeros(2)}
    assert ckpt.load("runs/a", found).step == 1
    assert found["w"].tolist() == [1, 1]
    assert not (tmp_path / "runs").exists()
