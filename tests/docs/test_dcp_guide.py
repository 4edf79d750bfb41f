"""The guide to torch.distributed.checkpoint runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "dcp.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    space: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(GUIDE), "exec"), space)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "theirs", "for-others"}
