"""multiprocessing's fork servers, one for each set of imports, which all modules of tests share.

multiprocessing has one server at a time. That of another set is put aside meanwhile: to start one
takes the seconds that its imports take.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

_STATE = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")
_aside: dict[tuple[str, ...], dict[str, Any]] = {}
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def forking(*modules: str) -> ForkServerContext:
    """Return the way to start processes that have imported ``modules``.

    They have the environment of the test in which their server began.
    """
    context = multiprocessing.get_context("forkserver")
    if (*_server._preload_modules,) != modules:
        put_aside()
        vars(_server).update(_aside.pop(modules, {}))
    context.set_forkserver_preload([*modules])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of the preload
        forkserver.ensure_running()
    _aside.setdefault(modules, {})
    return context


def put_aside() -> None:
    """Make room for a server with other imports; end one that is none of `forking`."""
    modules = (*_server._preload_modules,)
    if modules not in _aside or _server._forkserver_pid is None:
        _server._stop()
        return
    _aside[modules] = {name: vars(_server)[name] for name in _STATE}
    vars(_server).update(dict.fromkeys(_STATE))
    _server._preload_modules = ["__main__"]
