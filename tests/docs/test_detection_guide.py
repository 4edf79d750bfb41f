"""The example of the guide to detection runs, and does what the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "detection.md"


def test_the_guarded_script_goes_back_once_and_completes(tmp_path: Path) -> None:
    found = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"30 steps in 2 generations, error [\d.]+\n", done.stdout)
