"""Sidecars that stop at a point of a slot's life; `stopping` implements it inside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tree import HELPERS


@contextmanager
def stopping_at(where: str | Path) -> Iterator[None]:
    """Have sidecars that start meanwhile stop at ``POINT:N``, or as a file will say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HELPERS / "stopping"))
        patch.setenv("HOLDFAST_TEST_STOP_AT", str(where))
        yield
