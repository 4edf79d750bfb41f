"""The program of the guide to islands, run as two of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import blocks
from tree import ROOT

from holdfast import ckpt

GUIDE = ROOT / "docs" / "how-to" / "islands.md"
DEADLINE_S = 300.0
CLI = (sys.executable, "-m", "holdfast.tools.cli")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The place of the sea, and what each island printed."""
    place = tmp_path_factory.mktemp("islands")
    source, *_ = blocks(GUIDE, "python")
    (place / "train.py").write_text(source)
    running = [
        subprocess.Popen(
            [*CLI, "run", "--island", name, "--sea", str(place / "sea"), "train.py"],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("oslo", "lyon")
    ]
    said = []
    try:
        for process in running:
            out, error = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, error
            said.append(out)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return place / "sea", said


def test_both_islands_end_with_the_same_weights(trained: tuple[Path, list[str]]) -> None:
    _, said = trained
    hashes = {re.search(r"^weights ([0-9a-f]{12})$", each, re.MULTILINE) for each in said}
    assert len({found and found[1] for found in hashes} - {None}) == 1


def test_the_last_island_leaves_the_weights_as_a_checkpoint(
    trained: tuple[Path, list[str]],
) -> None:
    sea, _ = trained
    with ckpt.open(sea / "weights") as found:
        assert {"model.0.weight", "model.2.bias"} <= set(found.keys())


def test_the_command_of_the_guide_shows_the_sea(
    trained: tuple[Path, list[str]],
) -> None:
    sea, _ = trained
    done = subprocess.run(
        [*CLI, "islands", "status", "--sea", str(sea), "--listen", "0.1"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "13 merges; all have left" in done.stdout
