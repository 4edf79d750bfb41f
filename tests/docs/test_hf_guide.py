"""The script of the guide to Trainers runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_packages import needs
from document_blocks import blocks, run_script

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "hf.md"


@needs("transformers", "accelerate")
def test_the_script_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "1"
    )  # several threads wait for each other on a busy machine
    (script,) = blocks(GUIDE, "python")
    assert "'epoch': '5'" in run_script(tmp_path, script)
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_the_users_part_is_short() -> None:
    (script,) = blocks(GUIDE, "python")
    lines = [line for line in script.splitlines() if line and not line.startswith(("import", "fr"))]
    assert len(lines) <= 15
