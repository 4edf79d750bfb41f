"""Processes of a crowd, which live as long as the pipe that each of them gets."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from holdfast.ckpt.errors import PeerError


@contextmanager
def process(
    serve: Callable[..., None], *words: object, preload: Sequence[str] = ()
) -> Iterator[Connection]:
    """Run a function in a process of its own, which ends with the pipe that it gets.

    With ``preload`` it is forked from one that has imported these modules.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload(list(preload))
    ours, theirs = multiprocessing.Pipe()
    started = context.Process(target=serve, args=(*words, theirs), daemon=True)
    started.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        started.kill()
        started.join()


def answer(pipe: Connection, *, limit_s: float) -> Any:
    """Return what a process sends next. Raises ``PeerError`` if it ends, or says nothing."""
    if not pipe.poll(limit_s):
        raise PeerError(f"a process did not answer within {limit_s:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise PeerError("a process ended early") from error
