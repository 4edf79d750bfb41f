"""A run of sections yields each as it ends, and shows its progress on a terminal alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.tools.bench import control
from holdfast.tools.bench.progress import measured
from holdfast.tools.bench.samples import BenchSetup


@pytest.mark.parametrize("is_terminal", [True, False])
def test_sections_in_turn(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(control, "QUICK_WORLDS", (10,))
    setup = BenchSetup(
        size_bytes=1 << 16, repeat=1, directory=tmp_path, lap=lambda: None, quick=True
    )
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120)
    seen, before = [], ""
    for name, found, seconds in measured(["control", "parity"], setup, console=console):
        assert found and seconds > 0
        assert {result.section for result in found} == {name}
        seen.append(name)
        new, before = shown.getvalue().removeprefix(before), shown.getvalue()
        if is_terminal:
            assert f"{name} ({len(seen)} of 2)" in new
            assert "left about" in new
        else:
            assert new == ""
    assert seen == ["control", "parity"]
