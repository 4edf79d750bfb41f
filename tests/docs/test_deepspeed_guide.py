"""The program of the guide to DeepSpeed continues from a stored ZeRO directory."""

from __future__ import annotations

from pathlib import Path

from document_blocks import blocks, run_script

from holdfast.tools.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "deepspeed.md"
SAMPLE = Path(__file__).parents[1] / "format" / "deepspeed" / "zero1"


def test_a_script_without_deepspeed_continues(tmp_path: Path) -> None:
    assert main(["convert", str(SAMPLE), str(tmp_path / "runs" / "start")]) == 0
    (program,) = blocks(GUIDE, "python")
    assert run_script(tmp_path, program) == "step 2, learning rate 0.014\n"
