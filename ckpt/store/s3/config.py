"""The configuration of the connection to an S3 server. Nothing here needs boto3."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from holdfast.ckpt.errors import StoreError

_MIB: Final = 1 << 20
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """The server, its credentials, and the limits of requests.

    Fields that are None are left to boto3's standard chain (environment, shared files, instance
    role). At most ``part_bytes * threads`` of the written bytes are in flight at once. Beyond 2,000
    parts (62.5 GiB of 32 MiB parts) parts double in size every 2,000, so that 10,000 of them hold
    1.9 TiB. One request, its retries included, takes ``deadline_s`` at most; a large file is many
    requests. A connection that moves nothing for ``stall_s`` is given up. An unfinished upload that
    received no part for ``abandoned_s`` counts as abandoned, and is swept.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    part_bytes: int = 32 * _MIB
    threads: int = 8
    connect_s: float = 10.0
    stall_s: float = 20.0
    deadline_s: float = 180.0
    pause_s: float = 0.1
    longest_pause_s: float = 10.0
    abandoned_s: float = _DAY_S

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint_url) if self.endpoint_url is not None else None
        if url and (url.scheme not in ("http", "https") or not url.hostname):
            raise StoreError(f"S3 endpoint {url.hostname!r}: write it as http(s)://host[:port]")
        if url and (url.username or url.password):
            raise StoreError(
                f"S3 endpoint {url.hostname}: carries credentials; give them as AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY instead"
            )
        if not 5 * _MIB <= self.part_bytes <= 512 * _MIB:
            raise StoreError(f"S3 parts of {self.part_bytes} bytes: use 5 MiB to 512 MiB")
        if not 1 <= self.threads <= 256:
            raise StoreError(f"{self.threads} S3 threads: use 1 to 256")
        if not 0 < 2 * self.stall_s <= self.deadline_s:
            raise StoreError(
                f"S3 deadline of {self.deadline_s} s with stalls of {self.stall_s} s: there must "
                "be time for two attempts"
            )

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> S3Config:
        """Return the configuration of the AWS variables; an empty variable counts as unset."""

        def first(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        return S3Config(
            endpoint_url=first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            region=first("AWS_REGION", "AWS_DEFAULT_REGION"),
            profile=first("AWS_PROFILE"),
            access_key=first("AWS_ACCESS_KEY_ID"),
            secret_key=first("AWS_SECRET_ACCESS_KEY"),
            session_token=first("AWS_SESSION_TOKEN"),
        )

    def nbytes_of_part(self, number: int) -> int:
        """Return the size of part ``number`` (from 1) of a file large enough to have it."""
        return self.part_bytes << ((number - 1) // 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Timing:
    """Time and randomness, in seconds; tests replace them."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    between: Callable[[float, float], float] = random.uniform
