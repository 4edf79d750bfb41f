"""The guide to patterns: its examples run, its pattern file is one, and its lists are complete."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from document_blocks import blocks
from doubles.interchange import ArraySource, read_all

from holdfast.ckpt.convert.patterns.choice import Patterns, shipped
from holdfast.ckpt.convert.patterns.language import KINDS
from holdfast.ckpt.convert.patterns.pattern_files import parse
from holdfast.ckpt.convert.patterns.source import PatternedSource

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "patterns.md"


def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = blocks(GUIDE, "python")
    assert len(examples) == 2
    space: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(GUIDE), "exec"), space)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"ranks", "whole", "three"}


def test_the_pattern_file_takes_fused_heads_apart() -> None:
    (text,) = blocks(GUIDE, "toml")
    fused, norm = np.arange(24, dtype=np.float32).reshape(12, 2), np.ones(3, np.float32)
    source = ArraySource(
        {
            "tp0.layers.0.qkv.weight": (fused[:6], "float32"),
            "tp1.layers.0.qkv.weight": (fused[6:], "float32"),
            "tp0.layers.0.norm": (norm, "float32"),
            "tp1.layers.0.norm": (norm, "float32"),
        }
    )
    chosen = Patterns(file=parse(text, origin="guide"), sizes={"kv_heads": 2})
    found = read_all(PatternedSource(source, chosen))
    assert found["layers.0.k.weight"] == fused[[4, 10]].tobytes()
    assert found["layers.0.norm"] == norm.tobytes()


def test_the_tables_have_every_step_and_every_shipped_file() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", GUIDE.read_text(), re.MULTILINE)
    assert set(KINDS) <= set(rows)
    assert set(shipped()) <= set(rows)
