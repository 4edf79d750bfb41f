"""Requests to one container: obstore retries them, within a deadline."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from obstore.store import AzureStore, GCSStore

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.cloud.config import AZURE, CloudConfig
from holdfast.ckpt.store.cloud.errors import FAILURES, faults_of, refusal
from holdfast.ckpt.store.objects.limits import RequestTiming
from holdfast.ckpt.store.objects.retries import Retrier

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_MANY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudTarget:
    """An object in a container; ``where`` is its address for people."""

    key: str
    where: str


class CloudConnection:
    """A client of one container, with its threads; all threads of one process may share it."""

    def __init__(
        self, container: str, config: CloudConfig, timing: RequestTiming | None = None
    ) -> None:
        self.config, self.provider = config, config.provider
        place = f"{self.provider.scheme}://{container}"
        with self.refusing(place, "prepare requests to it"):
            self.store: ObjectStore = _store(container, config)
        self.retrier = Retrier(config, faults_of(self.provider), timing)
        """For requests that obstore does not send again, such as those with a condition."""
        self.pool = ThreadPoolExecutor(config.threads, thread_name_prefix="holdfast-cloud")
        self.proves_conditions = False
        """True once the server has shown that it obeys conditions."""
        self.probing = threading.Lock()

    @contextlib.contextmanager
    def refusing(self, where: str, doing: str) -> Iterator[None]:
        """Turn errors of obstore into ``NotFoundError`` and ``StoreError``."""
        try:
            yield
        except FAILURES as error:
            raise refusal(error, where=where, doing=doing, provider=self.provider) from error


def _store(container: str, config: CloudConfig) -> AzureStore | GCSStore:
    stall = timedelta(seconds=config.stall_s)
    client: ClientConfig = {
        "allow_http": config.is_plain,
        "connect_timeout": timedelta(seconds=config.connect_s),
        "read_timeout": stall,
        "timeout": timedelta(seconds=config.deadline_s),
    }
    retry: RetryConfig = {
        "max_retries": _MANY,
        "retry_timeout": timedelta(seconds=max(0.0, config.deadline_s - config.stall_s)),
        "backoff": {
            "init_backoff": timedelta(seconds=config.pause_s),
            "max_backoff": timedelta(seconds=config.longest_pause_s),
            "base": 2,
        },
    }
    kind = AzureStore if config.provider is AZURE else GCSStore
    return kind(
        container,
        config=cast("Any", dict(config.settings)),
        client_options=client,
        retry_config=retry,
    )


_first_user: int = 0


@lru_cache(maxsize=8)
def _connection(container: str, config: CloudConfig) -> CloudConnection:
    return CloudConnection(container, config)


def connect(container: str, config: CloudConfig) -> CloudConnection:
    """Return this process's connection.

    Raises ``StoreError`` in a forked child of a process that has one: obstore's threads do not
    survive a fork, and its requests would never end.
    """
    global _first_user  # noqa: PLW0603 - the one process that obstore's threads belong to
    _first_user = _first_user or os.getpid()
    if os.getpid() != _first_user:
        raise StoreError(
            f"{config.provider.scheme}://{container}: this process was forked from one that had "
            "used gs:// or az:// before, and obstore cannot go on in it; start it by spawn or "
            "forkserver"
        )
    return _connection(container, config)
