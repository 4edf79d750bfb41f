"""Record logs in the sidecars of a job, as adapters use them: operations, and patient reading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from holdfast.ckpt.errors import CkptError, NotFoundError

_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.1

_Value = TypeVar("_Value")


class LogStore(Protocol):
    """The sidecar client's log operations, or a fake's."""

    def log_open(self, name: str) -> int:
        """Create or find a log; return the index of its next record."""

    def log_append(self, name: str, records: Sequence[bytes]) -> int:
        """Append records; return the next index."""

    def log_truncate(self, name: str, keep_from: int) -> None:
        """Drop the records before index ``keep_from``."""


class LogReader(Protocol):
    """Reads record logs: the sidecar client, or a fake."""

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        """Return all records of a log, from any remaining copy."""

    def log_drop(self, name: str, *, node: str) -> None:
        """Drop a log and its copies."""


def read_records(
    logs: LogReader,
    name: str,
    take: Callable[[list[bytes]], _Value],
    *,
    node: str,
    limit_s: float,
    over: Callable[[], bool] = lambda: False,
) -> _Value:
    """Return ``take(records)`` of a log; of no records if it cannot be read within ``limit_s``.

    ``over`` returns True once the log is not needed any more.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return take(logs.log_read(name, node=node))
        except NotFoundError:
            return take([])
        except CkptError as error:
            if time.monotonic() > deadline or over():
                _log.warning("the log %s of node %s is lost: %s", name, node, error)
                return take([])
            time.sleep(_RETRY_S)
