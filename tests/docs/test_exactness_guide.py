"""The example of the guide to exactness trains as it is printed there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "exactness.md"


def test_the_example_of_the_guide_trains_a_ddp_model_in_fixed_point(tmp_path: Path) -> None:
    found = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"30 steps, loss [\d.]+\n", done.stdout)
