"""The script of the guide to accelerate runs as it stands, and goes on when it is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_packages import needs
from document_blocks import blocks, run_script

from holdfast.ckpt.checkpoints.catalog import committed_steps

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "accelerate.md"
LOAD = "step = checkpoints.load()"


@needs("accelerate")
def test_the_script_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (script,) = blocks(GUIDE, "python")
    assert LOAD in script
    told = script.replace(LOAD, f"{LOAD}\nprint('from', step)") + "\nprint('until', step)\n"
    assert run_script(tmp_path, told) == "from 0\nuntil 64\n"
    assert committed_steps(tmp_path / "runs" / "demo") == [40, 50, 60]
    assert run_script(tmp_path, told) == "from 60\nuntil 64\n"


def test_the_users_part_is_short() -> None:
    (script,) = blocks(GUIDE, "python")
    lines = [line for line in script.splitlines() if line and not line.startswith(("import", "fr"))]
    assert len(lines) <= 16
