"""gRPC and etcd's messages; importing this module needs the extra ``holdfast[etcd]``.

Only the generated stubs of aetcd are used (see docs/explanation/decisions/0011). Both packages have
no types, and neither may be imported in a trainer's process: this module is for agents and
launchers.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

from holdfast.elastic.errors import ConfigError

_FORK: Final = "GRPC_ENABLE_FORK_SUPPORT"


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{error.name or name} is not installed, which etcd:// needs; install holdfast[etcd]"
        ) from error


def _load_grpc() -> Any:
    """Load gRPC without its fork handlers, which abort children of a process with connections.

    gRPC reads the variable once, at its first channel; programs started later must not see it.
    """
    before = os.environ.get(_FORK)
    os.environ[_FORK] = "0"
    try:
        found = _load("grpc")
        found.insecure_channel("127.0.0.1:1").close()
    finally:
        if before is None:
            del os.environ[_FORK]
        else:
            os.environ[_FORK] = before
    return found


grpc: Any = _load_grpc()
rpc: Any = _load("aetcd.rpc")
