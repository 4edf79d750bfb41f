"""Pruning keeps the requested steps, and always the newest verified checkpoint."""

from pathlib import Path

import pytest
import torch
from doubles.pruning import prune

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.errors import UnsafePathError
from holdfast.ckpt.format.manifest import RETAINED, seal_note
from holdfast.tools import cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        ckpt.save(tmp_path, {"x": torch.full((5,), float(step))}, step=step)
    return tmp_path


def truncate_pack(root: Path, step: int) -> None:
    pack = next((root / f"step-{step:012d}" / "data").iterdir())
    pack.write_bytes(pack.read_bytes()[:-1])


def test_pruned_steps_are_gone_and_the_others_load(root: Path) -> None:
    assert prune(root, keep_last=2) == [1, 2]
    assert sorted(path.name for path in root.iterdir()) == [f"step-{s:012d}" for s in (3, 4)]
    assert float(ckpt.open(root)["x"][0]) == 4.0


@pytest.mark.parametrize("link", ["data", "index", ""])
def test_links_do_not_lead_out_of_the_root(root: Path, tmp_path: Path, link: str) -> None:
    """Somebody else may have prepared the root."""
    victim = tmp_path.parent / f"{tmp_path.name}-victim"
    files = [victim / ".thesis.tmp", victim / "id_rsa" if link else victim / "data" / "id_rsa"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("secret")
    place = root / "step-000000000000"
    if link:
        place.mkdir()
        (place / link).symlink_to(victim)
    else:
        place.symlink_to(victim)
    (place / RETAINED).write_bytes(seal_note([f"{link or 'data'}/id_rsa"]))
    with pytest.raises(UnsafePathError, match=r"is a link .*remove it by hand"):
        prune(root, keep_last=1)
    assert all(file.exists() for file in files)


def test_a_damaged_newest_step_does_not_cost_the_good_one(root: Path) -> None:
    truncate_pack(root, 4)
    assert prune(root, keep_last=1) == [1, 2]
    assert committed_steps(root) == [3, 4]


def test_nothing_goes_when_nothing_can_be_trusted(root: Path) -> None:
    for step in (1, 2, 3, 4):
        truncate_pack(root, step)
    with pytest.raises(ckpt.CorruptError):
        prune(root, keep_last=1)
    assert committed_steps(root) == [1, 2, 3, 4]


def test_the_command_says_what_it_did(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prune", str(root), "--keep-last", "1"]) == 0
    assert "removed 3 checkpoints: 1, 2, 3 (" in capsys.readouterr().out


def test_the_command_explains_an_empty_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prune", str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert str(tmp_path) in output
