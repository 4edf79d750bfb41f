"""The user's part of the guide to torchtitan is short; tests/adapters runs it in torchtitan."""

from __future__ import annotations

from pathlib import Path

from document_blocks import blocks

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "torchtitan.md"


def test_the_users_part_is_short() -> None:
    (module,) = blocks(GUIDE, "python")
    compile(module, str(GUIDE), "exec")
    lines = [line for line in module.splitlines() if line and not line.startswith(("import", "fr"))]
    assert len(lines) <= 5
