"""The configuration of the connection to an S3 server. Nothing here needs boto3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.objects.limits import ObjectLimits

_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config(ObjectLimits):
    """The server, its credentials, and the limits of requests.

    Fields that are None are left to boto3's standard chain (environment, shared files, instance
    role). Beyond 2,000 parts (62.5 GiB of 32 MiB parts) parts double in size every 2,000, so that
    10,000 of them hold 1.9 TiB. An unfinished upload that received no part for ``abandoned_s``
    counts as abandoned, and is swept.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
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
        ObjectLimits.__post_init__(self)

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
