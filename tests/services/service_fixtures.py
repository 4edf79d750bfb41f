"""Fixtures of the services, started at first use and shared by all processes of a run.

If a service cannot be installed, its tests skip with the reason; on CI (``CI`` is set) or with
``HOLDFAST_REQUIRE_SERVICES=1`` they fail instead.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ceph
import keeper
import pytest

from holdfast.ckpt.store.cloud.config import AZURE, GOOGLE, CloudConfig, Provider
from holdfast.ckpt.store.s3.config import S3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """A prefix of its own in a bucket of a running S3 server."""

    endpoint: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str
    prefix: str
    ceph_config: str = ""

    @property
    def url(self) -> str:
        """Return the place as ``s3://bucket/prefix``."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return what `ceph.client` wants."""
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "bucket": self.bucket,
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

    def through(self, endpoint: str) -> S3Place:
        """Return the same place reached by another address."""
        return replace(self, endpoint=endpoint)

    def config(self, **changes: Any) -> S3Config:
        """Return the configuration for it, with deadlines short enough for tests."""
        short = {"part_bytes": 5 << 20, "stall_s": 5.0, "deadline_s": 30.0, "pause_s": 0.02}
        return S3Config(
            endpoint_url=self.endpoint,
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
            **{**short, **changes},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudPlace:
    """A prefix of its own in a container of a running server of Azure's or Google's interface."""

    provider: Provider
    endpoint: str
    container: str
    prefix: str
    settings: dict[str, str] = field(repr=False)

    @property
    def url(self) -> str:
        """Return the place as ``az://container/prefix`` or ``gs://bucket/prefix``."""
        return f"{self.provider.scheme}://{self.container}/{self.prefix}"

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

    def through(self, endpoint: str) -> CloudPlace:
        """Return the same place reached by another ``http://host:port``."""
        parts = urlsplit(self.endpoint)
        return replace(self, endpoint=f"{endpoint}{parts.path}")

    def config(self, **changes: Any) -> CloudConfig:
        """Return the configuration for it, with deadlines short enough for tests."""
        short = {"part_bytes": 5 << 20, "stall_s": 5.0, "deadline_s": 30.0, "pause_s": 0.02}
        return CloudConfig(
            provider=self.provider,
            settings=tuple(self._settings().items()),
            **{**short, **changes},
        )

    @property
    def secrets(self) -> list[str]:
        """Return the texts that no message may contain."""
        return [value for name, value in self.settings.items() if name.endswith(("_key", "_token"))]

    def _settings(self) -> dict[str, str]:
        name = "endpoint" if self.provider is AZURE else "base_url"
        return {name: self.endpoint, **self.settings}


@contextlib.contextmanager
def service(
    name: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of a service, one for all processes of this run."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a worker of xdist: its parent's is common
        folder = folder.parent
    try:
        with keeper.shared(folder / name, Path(__file__).with_name(f"{name}.py")) as facts:
            yield facts
    except keeper.CannotInstall as error:
        if keeper.required(name):
            pytest.fail(f"{name} is required here, but {error}", pytrace=False)
        pytest.skip(f"no {name}: {error}")


@pytest.fixture(scope="session")
def s3_server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of a Ceph gateway."""
    with service("ceph", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(scope="session")
def emulator(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of an emulator that behaves as AWS does."""
    with service("ministack", tmp_path_factory, request) as facts:
        yield facts


def _place(facts: keeper.Facts) -> S3Place:
    return S3Place(
        endpoint=facts["endpoint"],
        region=facts["region"],
        access_key=facts["access_key"],
        secret_key=facts["secret_key"],
        bucket=facts["bucket"],
        prefix=f"test/{uuid.uuid4().hex}",
        ceph_config=facts["config"],
    )


@pytest.fixture
def s3_place(s3_server: keeper.Facts) -> S3Place:
    """Return a prefix of this test's own on Ceph's gateway."""
    return _place(s3_server)


@pytest.fixture
def emulator_place(emulator: keeper.Facts) -> S3Place:
    """Return a prefix of this test's own on the emulator."""
    return _place(emulator)


@pytest.fixture
def s3_environment(s3_place: S3Place, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """As `s3_place`, with the environment set so that ``s3://`` means that server."""
    for name, value in s3_place.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    return s3_place


@pytest.fixture
def second_gateway(s3_place: S3Place) -> Iterator[tuple[S3Place, Any]]:
    """Yield the place through a gateway of its own, and that gateway's process, to be abused."""
    log_path = Path(s3_place.ceph_config).with_name("gateway.out")
    with log_path.open("ab") as log:
        name = uuid.uuid4().hex[:8]
        process, endpoint = ceph.gateway(Path(s3_place.ceph_config), name, log)
        try:
            place = s3_place.through(endpoint)
            ceph.await_gateway(place.facts)
            yield place, process
        finally:
            keeper.end(process)


@pytest.fixture(scope="session")
def azurite(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of Azurite."""
    with service("azurite", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture(scope="session")
def azurite_installed(azurite: keeper.Facts) -> None:
    """Make sure that tests can start an Azurite of their own."""


def azure_place_of(facts: keeper.Facts) -> CloudPlace:
    """Return a new prefix on a running Azurite."""
    return CloudPlace(
        provider=AZURE,
        endpoint=facts["endpoint"],
        container=facts["container"],
        prefix=f"test/{uuid.uuid4().hex}",
        settings={"account_name": facts["account"], "account_key": facts["key"]},
    )


@pytest.fixture
def azure_place(azurite: keeper.Facts) -> CloudPlace:
    """Return a prefix of this test's own on Azurite."""
    return azure_place_of(azurite)


@pytest.fixture
def azure_environment(azure_place: CloudPlace, monkeypatch: pytest.MonkeyPatch) -> CloudPlace:
    """As `azure_place`, with the environment set so that ``az://`` means that server."""
    for name, value in azure_place.environment.items():
        monkeypatch.setenv(name, value)
    return azure_place


@pytest.fixture(scope="session")
def google_xml(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[keeper.Facts]:
    """Yield the facts of the tests' own server of Google's interface."""
    with service("google_xml", tmp_path_factory, request) as facts:
        yield facts


@pytest.fixture
def google_place(google_xml: keeper.Facts) -> CloudPlace:
    """Return a prefix of this test's own on that server."""
    return CloudPlace(
        provider=GOOGLE,
        endpoint=google_xml["endpoint"],
        container=google_xml["bucket"],
        prefix=f"test/{uuid.uuid4().hex}",
        settings={"bearer_token": "a-token-of-the-tests"},
    )


@pytest.fixture(params=["azure_place", "google_place"])
def cloud_place(request: pytest.FixtureRequest) -> CloudPlace:
    """Return a prefix of this test's own, on one server after the other."""
    found: CloudPlace = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def cloud_environment(cloud_place: CloudPlace, monkeypatch: pytest.MonkeyPatch) -> CloudPlace:
    """As `cloud_place`, with the environment set so that its scheme means that server."""
    for name, value in cloud_place.environment.items():
        monkeypatch.setenv(name, value)
    return cloud_place
