"""Entries of a log of finished work: split into records, and joined."""

from __future__ import annotations

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 3])
def test_an_entry_comes_back_from_its_records(data: bytes) -> None:
    from holdfast.adapters.hf.grpo.records import join, split

    records = split("a/1", data, part_bytes=100)
    assert len(records) == max(1, -(-len(data) // 100))
    assert join([*split("b", b"other"), *records]) == {"b": b"other", "a/1": data}


def test_an_entry_that_was_cut_off_is_not_there_and_the_last_of_a_key_counts() -> None:
    from holdfast.adapters.hf.grpo.records import join, split

    old, new = split("a", b"old" * 9, part_bytes=9), split("a", b"newer", part_bytes=9)
    assert join(old[:-1]) == {}
    assert join([*old[:-1], *new]) == {"a": b"newer"}
    assert join([*new, *old[:-1]]) == {"a": b"newer"}


def test_entries_are_chosen_by_the_begin_of_their_keys() -> None:
    from holdfast.adapters.hf.grpo.records import chosen

    assert chosen({"3/ab/x": b"1", "4/ab/x": b"2"}, begin="4/ab/") == {"x": b"2"}


def test_other_bytes_are_refused() -> None:
    from holdfast.adapters.hf.grpo.records import join
    from holdfast.ckpt import CorruptError

    with pytest.raises(CorruptError, match="no part of an entry"):
        join([b"\x04\0\0\0none"])
