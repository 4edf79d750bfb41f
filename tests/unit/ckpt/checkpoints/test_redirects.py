"""A root that stands for another: writes go there, and reads of what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import ckpt
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.errors import NotFoundError


@pytest.fixture(autouse=True)
def _none_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(redirects, "_instead", {})
    monkeypatch.chdir(tmp_path)


def save(root: str | Path, step: int, value: float = 0.0) -> str:
    return ckpt.save(root, {"w": torch.full((4,), value)}, step=step)


def loaded(root: str | Path, step: int | None = None) -> tuple[int, float]:
    state = {"w": torch.zeros(4)}
    report = ckpt.load(root, state, step=step)
    return report.step, state["w"][0].item()


def test_what_was_written_in_its_place_is_loaded(tmp_path: Path) -> None:
    save("own", 9, 9.0)
    redirects.redirect("own", to=str(tmp_path / "other"))
    assert save("own", 5, 5.0) == str(tmp_path / "other" / "step-000000000005")
    assert loaded("own") == loaded(tmp_path / "other") == (5, 5.0)
    with ckpt.open("own") as found:
        assert found.step == 5
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-000000000009"]


def test_what_was_not_written_there_is_read_from_the_root_itself(tmp_path: Path) -> None:
    step = save("own", 9, 9.0)
    redirects.redirect("own", to=str(tmp_path / "other"))
    assert loaded("own") == (9, 9.0)
    save("own", 5, 5.0)
    assert loaded("own", 9) == loaded(step) == (9, 9.0)
    with ckpt.open("own", step=9) as found:
        assert found.step == 9
    with pytest.raises(NotFoundError, match=r"own: no checkpoint of step 7; steps there: 9"):
        loaded("own", 7)


def test_a_root_that_holds_nothing_is_named_as_the_script_named_it(tmp_path: Path) -> None:
    redirects.redirect("own", to=str(tmp_path / "other"))
    with pytest.raises(NotFoundError, match=r"^own: no checkpoint; there is no such directory"):
        loaded("own")


def test_every_spelling_of_the_root_is_meant(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    redirects.redirect("link/", to=str(tmp_path / "other"))
    redirects.redirect("s3://bucket/own", to="else")
    for spelling in ("own", "./x/../own/", tmp_path / "own", f"file://{tmp_path}/own"):
        assert redirects.to_write(spelling) == str(tmp_path / "other")
    assert redirects.to_write("s3://bucket/own/") == "else"
    assert redirects.to_write("own/below") == "own/below"


def test_tensors_are_converted_from_and_to_the_other_root(tmp_path: Path) -> None:
    redirects.redirect("own", to=str(tmp_path / "other"))
    redirects.redirect("target", to=str(tmp_path / "another"))
    save("own", 5, 5.0)
    with ckpt.CheckpointSource.open("own") as source, ckpt.CheckpointSink("target") as sink:
        transfer(source, sink, step=source.step)
    assert committed_steps(tmp_path / "another") == [5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "other"]
