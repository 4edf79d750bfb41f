"""Places of the object stores' tests: the same interface for S3, Azure and Google.

``s3`` is Ceph's gateway, ``az`` Azurite, ``gs`` the tests' own server. A test that takes
``object_place`` runs once for each.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

import keeper
import pytest

from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.cloud.config import AZURE, GOOGLE, CloudConfig, Provider
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.store import S3Store

KINDS = ("s3", "az", "gs")
PLACES = {"s3": "s3_place", "az": "azure_place", "gs": "google_place"}
"""Kind → the fixture of its place."""

WRONG = "bm90IHRoZSByaWdodCBvbmU="
_SHORT = {"part_bytes": 5 << 20, "stall_s": 5.0, "deadline_s": 30.0, "pause_s": 0.02}
"""Deadlines short enough for tests, and the smallest parts."""


class ObjectPlace(ABC):
    """A prefix of its own in a container of a running server."""

    kind: str
    endpoint: str
    container: str
    prefix: str

    @property
    def url(self) -> str:
        """Return the place as ``scheme://container/prefix``."""
        return f"{self.kind}://{self.container}/{self.prefix}"

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the variables by which clients find the server."""

    @property
    @abstractmethod
    def secrets(self) -> list[str]:
        """Return the texts that no message may contain."""

    @abstractmethod
    def through(self, endpoint: str) -> Self:
        """Return the same place reached by another ``http://host:port``."""

    @abstractmethod
    def within(self, container: str) -> Self:
        """Return the same prefix in another container."""

    @abstractmethod
    def with_wrong_keys(self) -> list[Self]:
        """Return the place with each of its keys replaced by `WRONG`."""

    @abstractmethod
    def store(self, **changes: Any) -> Store:
        """Return the store there; ``changes`` are fields of its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place(ObjectPlace):
    """A prefix of its own in a bucket of a running S3 server."""

    endpoint: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)
    container: str
    prefix: str
    ceph_config: str = ""
    kind: str = "s3"

    @property
    def facts(self) -> dict[str, Any]:
        """Return what `ceph.client` wants."""
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "bucket": self.container,
            "config": self.ceph_config,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which any S3 client finds the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }

    @property
    def secrets(self) -> list[str]:
        """Return the secret key."""
        return [self.secret_key]

    def through(self, endpoint: str) -> S3Place:
        """Return the same place reached by another address."""
        return replace(self, endpoint=endpoint)

    def within(self, container: str) -> S3Place:
        """Return the same prefix in another bucket."""
        return replace(self, container=container)

    def with_wrong_keys(self) -> list[S3Place]:
        """Return the place with a wrong secret key, and with an unknown access key."""
        return [replace(self, **{name: WRONG}) for name in ("secret_key", "access_key")]

    def config(self, **changes: Any) -> S3Config:
        """Return the configuration for it."""
        return S3Config(
            endpoint_url=self.endpoint,
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
            **{**_SHORT, **changes},
        )

    def store(self, **changes: Any) -> S3Store:
        """Return the store there."""
        return S3Store(self.url, self.config(**changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudPlace(ObjectPlace):
    """A prefix of its own in a container of a running server of Azure's or Google's interface."""

    provider: Provider
    endpoint: str
    container: str
    prefix: str
    settings: dict[str, str] = field(repr=False)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Return the scheme of its addresses."""
        return self.provider.scheme

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which obstore finds the server."""
        names = {
            "endpoint": "AZURE_STORAGE_ENDPOINT",
            "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
            "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
            "base_url": "GOOGLE_BASE_URL",
            "bearer_token": "GOOGLE_BEARER_TOKEN",
        }
        return {names[name]: value for name, value in self._settings().items()}

    @property
    def secrets(self) -> list[str]:
        """Return the account's key or the token."""
        return [self.settings[name] for name in self._keys()]

    def through(self, endpoint: str) -> CloudPlace:
        """Return the same place reached by another ``http://host:port``."""
        parts = urlsplit(self.endpoint)
        return replace(self, endpoint=f"{endpoint}{parts.path}")

    def within(self, container: str) -> CloudPlace:
        """Return the same prefix in another container."""
        return replace(self, container=container)

    def with_wrong_keys(self) -> list[CloudPlace]:
        """Return the place with a wrong key."""
        return [replace(self, settings=self.settings | {name: WRONG}) for name in self._keys()]

    def config(self, **changes: Any) -> CloudConfig:
        """Return the configuration for it."""
        return CloudConfig(
            provider=self.provider,
            settings=tuple(self._settings().items()),
            **{**_SHORT, **changes},
        )

    def store(self, **changes: Any) -> CloudStore:
        """Return the store there."""
        return CloudStore(self.url, self.config(**changes))

    def _settings(self) -> dict[str, str]:
        name = "endpoint" if self.provider is AZURE else "base_url"
        return {name: self.endpoint, **self.settings}

    def _keys(self) -> list[str]:
        return [name for name in self.settings if name.endswith(("_key", "_token"))]


def new_prefix() -> str:
    """Return a prefix that nobody used before."""
    return f"test/{uuid.uuid4().hex}"


def s3_place_of(facts: keeper.Facts) -> S3Place:
    """Return a new prefix on a running S3 server."""
    return S3Place(
        endpoint=facts["endpoint"],
        region=facts["region"],
        access_key=facts["access_key"],
        secret_key=facts["secret_key"],
        container=facts["bucket"],
        prefix=new_prefix(),
        ceph_config=facts["config"],
    )


def azure_place_of(facts: keeper.Facts) -> CloudPlace:
    """Return a new prefix on a running Azurite."""
    return CloudPlace(
        provider=AZURE,
        endpoint=facts["endpoint"],
        container=facts["container"],
        prefix=new_prefix(),
        settings={"account_name": facts["account"], "account_key": facts["key"]},
    )


def google_place_of(facts: keeper.Facts) -> CloudPlace:
    """Return a new prefix on a running server of Google's interface."""
    return CloudPlace(
        provider=GOOGLE,
        endpoint=facts["endpoint"],
        container=facts["bucket"],
        prefix=new_prefix(),
        settings={"bearer_token": facts["token"]},
    )


@pytest.fixture
def s3_place(s3_server: keeper.Facts) -> S3Place:
    """Return a prefix of this test's own on Ceph's gateway."""
    return s3_place_of(s3_server)


@pytest.fixture
def emulator_place(emulator: keeper.Facts) -> S3Place:
    """Return a prefix of this test's own on the emulator of AWS."""
    return s3_place_of(emulator)


@pytest.fixture
def azure_place(azurite: keeper.Facts) -> CloudPlace:
    """Return a prefix of this test's own on Azurite."""
    return azure_place_of(azurite)


@pytest.fixture
def google_place(google_xml: keeper.Facts) -> CloudPlace:
    """Return a prefix of this test's own on the tests' server of Google's interface."""
    return google_place_of(google_xml)


@pytest.fixture(params=KINDS)
def object_place(request: pytest.FixtureRequest) -> ObjectPlace:
    """Return a prefix of this test's own, on one server after the other."""
    found: ObjectPlace = request.getfixturevalue(PLACES[request.param])
    return found


def entered(place: ObjectPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment so that the place's scheme means its server."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def object_environment(object_place: ObjectPlace, monkeypatch: pytest.MonkeyPatch) -> ObjectPlace:
    """As `object_place`, with the environment set so that its scheme means that server."""
    entered(object_place, monkeypatch)
    return object_place


@pytest.fixture
def s3_environment(s3_place: S3Place, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """As `s3_place`, with the environment set so that ``s3://`` means that server."""
    entered(s3_place, monkeypatch)
    return s3_place
