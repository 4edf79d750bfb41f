"""A node's memory is kept until it is removed, whatever becomes of the node's processes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.memory.arena import arena_path, sweep
from holdfast.elastic.launch.kept_arenas import KeptArenas


@pytest.fixture
def arena() -> Iterator[Path]:
    path = arena_path(f"test-{uuid.uuid4().hex[:6]}", "n0")
    yield path
    sweep(exactly=path.name)
    assert not path.exists()


def test_memory_that_is_kept_stays_until_it_is_removed(arena: Path) -> None:
    kept = KeptArenas()
    assert not kept.has(arena)
    kept.keep(arena)
    kept.keep(arena)
    assert kept.has(arena)
    sweep()
    assert arena.exists()
    kept.remove(arena, shared=False)
    assert not arena.exists()
    assert not kept.has(arena)


def test_memory_that_was_never_kept_is_removed_without_complaint(arena: Path) -> None:
    KeptArenas().remove(arena, shared=False)
    assert not arena.exists()
