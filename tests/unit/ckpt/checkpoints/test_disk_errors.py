"""A disk that refuses any call: a clear error, the old state unchanged, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import held, state
from doubles.checkpoints import write_checkpoint
from doubles.pruning import prune

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.local import LocalStore

CALLS = ("open", "writev", "fsync", "rename", "mkdir", "unlink")
ENOUGH = 1000


@contextlib.contextmanager
def refusing(number: int, code: int) -> Iterator[list[str]]:
    """Let the ``number``-th call that changes the disk fail; yield the calls so far."""
    done: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            reading = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
            cleaning = name == "unlink" and str(args[0]).endswith(".tmp")
            if not reading and not cleaning:
                done.append(name)
                if len(done) == number:
                    raise OSError(code, os.strerror(code))
            return None if name == "fsync" else real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, failing(name, getattr(os, name)))
        yield done


def save(root: Path, step: int, seed: int, *, base: int | None = None) -> None:
    write_checkpoint(root, state(seed), step=step, base=base, with_grids=False)


OLD = {1: 10, 2: 20}
Action = Callable[[Path], object]
CASES: dict[str, tuple[Action, dict[int, int]]] = {
    "saved": (lambda root: save(root, 3, 30), {1: 10, 2: 20, 3: 30}),
    "saved again": (lambda root: save(root, 2, 21), {1: 10, 2: 21}),
    "saved with a base": (lambda root: save(root, 3, 30, base=2), {1: 10, 2: 20, 3: 30}),
    "pruned": (lambda root: prune(root, keep_last=1), {2: 20}),
}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("case", CASES)
def test_a_refusal_at_any_call_is_a_clear_error(tmp_path: Path, case: str, code: int) -> None:
    action, new = CASES[case]
    for number in range(1, ENOUGH):
        root = tmp_path / str(number)
        with refusing(ENOUGH, code):
            save(root, 1, 10)
            save(root, 2, 20, base=1)
        store, error = LocalStore(root), None
        with refusing(number, code) as done:
            try:
                action(root)
            except StoreError as raised:
                error = raised
        if len(done) < number:
            assert error is None
            return
        found = held(store, settled=False)
        if error is None:
            assert found == new, f"call {number} of {done} failed unnoticed"
        else:
            assert str(root) in str(error)
            assert os.strerror(code) in str(error)
            assert all(
                found.get(step) in ({1: 10, 2: 20}.get(step), new.get(step)) for step in found
            )
        if done[number - 1] != "unlink":
            assert list(root.rglob("*.tmp")) == []
        with refusing(ENOUGH, code):
            action(root)
        assert held(store) == new
        assert list(root.rglob("*.tmp")) == []
    raise AssertionError("it never came to its end")
