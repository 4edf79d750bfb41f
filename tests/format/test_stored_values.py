"""Stored plain values of every tag still decode to the same values."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.ckpt.format.wellformed import fault_of_values
from holdfast.ckpt.state import plain

STORED = Path(__file__).with_name("plain_values_v2.json")


def test_every_stored_value_decodes_to_what_it_was() -> None:
    for shown, encoded in json.loads(STORED.read_text()).items():
        assert fault_of_values({"x": encoded}) is None
        value = plain.decode(encoded)
        assert repr(value) == shown
        assert plain.encode(value, "x") == encoded
