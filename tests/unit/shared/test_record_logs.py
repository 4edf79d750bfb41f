"""Patient reading of record logs: retried while nobody answers, empty where none is left."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.shared.record_logs import read_records
from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError


class Reader:
    """Raises each of its errors once, then has one record."""

    def __init__(self, *errors: CkptError) -> None:
        self._errors = list(errors)

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        if self._errors:
            raise self._errors.pop(0)
        return [f"{name} of {node}".encode()]

    def log_drop(self, name: str, *, node: str) -> None: ...


def read(reader: Any, **options: Any) -> list[bytes]:
    return read_records(reader, "log", list, node="n0", **{"limit_s": 60.0, **options})


def test_a_log_is_read_again_while_a_node_does_not_answer() -> None:
    assert read(Reader(PeerError("silent"))) == [b"log of n0"]


def test_a_log_that_nobody_has_is_empty() -> None:
    assert read(Reader(NotFoundError("none"))) == []


@pytest.mark.parametrize("options", [{"limit_s": -1.0}, {"over": lambda: True}])
def test_reading_is_given_up_with_a_warning(options: dict[str, Any], caplog: Any) -> None:
    assert read(Reader(PeerError("silent")), **options) == []
    assert "the log log of node n0 is lost: silent" in caplog.text
