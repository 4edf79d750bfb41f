"""The minimal reader printed in the document on the format reads every stored sample."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from make_sample import ALIASES, arrays_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "format.md"
SAMPLES = sorted(Path(__file__).parent.glob("v*"))


@pytest.mark.parametrize("sample", SAMPLES, ids=[path.name for path in SAMPLES])
def test_what_the_document_says_is_enough_to_read_a_checkpoint(sample: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    exec(blocks[-1], namespace)
    found = namespace["read"](sample / "step-000000000042")  # type: ignore[operator]
    arrays = arrays_of(int(sample.name[1:]))
    wanted = arrays | {name: arrays[fqn] for name, fqn in ALIASES.items()}
    assert found.keys() == wanted.keys()
    for fqn, (array, _) in wanted.items():
        np.testing.assert_array_equal(found[fqn], array)
        assert found[fqn].dtype == array.dtype
