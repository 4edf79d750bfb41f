"""A process that dies at any change to the store leaves the old state or the new one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from checkpoint_states import copied, files_of, held, needed_files, save
from doubles.memory_store import MemoryStore
from doubles.pruning import prune, remove
from fault_stores import Died, DyingStore, using

from holdfast.ckpt.format.manifest import RETAINED

Action = Callable[[], object]

STEPS_BEFORE: dict[str, list[Action]] = {
    "nothing": [],
    "a step": [lambda: save(1, 10)],
    "a base": [lambda: save(1, 10), lambda: save(2, 20, base=1), lambda: save(3, 30, base=2)],
    "a register": [
        lambda: save(1, 10, world_size=2, register_from=2),
        lambda: save(2, 20, world_size=2, register_from=2, base=1),
    ],
    "a base that is gone": [
        lambda: save(1, 10),
        lambda: save(2, 20, base=1),
        lambda: save(3, 30),
        lambda: remove("memory://", 1),
    ],
}

CASES: dict[str, tuple[str, Action, dict[int, int], dict[int, int]]] = {
    "first save": ("nothing", lambda: save(1, 11), {}, {1: 11}),
    "first save, two writers": ("nothing", lambda: save(1, 11, world_size=2), {}, {1: 11}),
    "saved again": ("a step", lambda: save(1, 11), {1: 10}, {1: 11}),
    "saved again, two writers": (
        "a step",
        lambda: save(1, 11, world_size=2),
        {1: 10},
        {1: 11},
    ),
    "first save with a register": (
        "nothing",
        lambda: save(1, 11, world_size=3, register_from=3),
        {},
        {1: 11},
    ),
    "saved again with a register": (
        "a step",
        lambda: save(1, 11, world_size=2, register_from=2),
        {1: 10},
        {1: 11},
    ),
    "saved again without a register": (
        "a register",
        lambda: save(1, 11, world_size=2),
        {1: 10, 2: 20},
        {1: 11, 2: 20},
    ),
    "a register with a base": (
        "a register",
        lambda: save(3, 30, world_size=2, register_from=2, base=2),
        {1: 10, 2: 20},
        {1: 10, 2: 20, 3: 30},
    ),
    "pruned with packs that a register needs": (
        "a register",
        lambda: prune("memory://", keep_last=1),
        {1: 10, 2: 20},
        {2: 20},
    ),
    "saved with a base": ("a step", lambda: save(2, 20, base=1), {1: 10}, {1: 10, 2: 20}),
    "a base saved again": (
        "a base",
        lambda: save(1, 11),
        {1: 10, 2: 20, 3: 30},
        {1: 11, 2: 20, 3: 30},
    ),
    "saved again with a base": (
        "a base",
        lambda: save(2, 21, base=3),
        {1: 10, 2: 20, 3: 30},
        {1: 10, 2: 21, 3: 30},
    ),
    "pruned with packs that are needed": (
        "a base",
        lambda: prune("memory://", keep_last=1),
        {1: 10, 2: 20, 3: 30},
        {3: 30},
    ),
    "pruned with packs of a step that is gone": (
        "a base that is gone",
        lambda: prune("memory://", keep_last=1),
        {2: 20, 3: 30},
        {3: 30},
    ),
    "saved where a step was removed": (
        "a base that is gone",
        lambda: save(1, 10),
        {2: 20, 3: 30},
        {1: 10, 2: 20, 3: 30},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_before_any_change_it_is_old_or_new(case: str) -> None:
    start, action, old, new = CASES[case]
    before = MemoryStore()
    with using(before):
        for each in STEPS_BEFORE[start]:
            each()
        assert held(before) == old
    for changes in range(1000):
        store = copied(before)
        with using(dying := DyingStore(store, changes=changes)), contextlib.suppress(Died):
            action()
        with using(store):
            found = held(store, settled=False)
            assert all(found.get(s) in (old.get(s), new.get(s)) for s in old | new), changes
            assert found.keys() <= (old | new).keys()
            action()
            assert held(store) == new
            assert leftovers(store) == set(), changes
        if not dying.dead:
            return
    raise AssertionError("it never came to its end")


def leftovers(store: MemoryStore) -> set[str]:
    """Return the files that no step needs; a note of files still needed does not count."""
    left = files_of(store) - needed_files(store)
    held_back = {folder_of(path) for path in needed_files(store)}
    return {path for path in left if not (is_note(path) and folder_of(path) in held_back)}


def folder_of(path: str) -> str:
    return path.partition("/")[0]


def is_note(path: str) -> bool:
    return path.endswith(RETAINED)


def test_retained_packs_go_with_the_last_step_that_needs_them() -> None:
    with using(store := MemoryStore()):
        save(1, 10)
        save(2, 20, base=1)
        save(3, 30, base=2)
        prune("memory://", keep_last=1)
        assert any(name.startswith("step-000000000001/data") for name in files_of(store))
        save(4, 40)
        prune("memory://", keep_last=1)
        assert held(store) == {4: 40}
        assert files_of(store) == needed_files(store)
