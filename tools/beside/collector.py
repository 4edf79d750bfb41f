"""The address of an OTLP collector, checked before a job starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from holdfast.elastic.errors import ConfigError

_PATH: Final = "/v1/traces"
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def collector_url(text: str) -> str:
    """Return the whole address of a collector; one without a path gets OTLP's.

    Raises ``ConfigError`` for an address that is none, or that has a password in it, and
    ``ModuleNotFoundError`` if the extra is not installed.
    """
    found = urlsplit(text)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ConfigError(
            f"--otlp {text}: not the address of an OTLP/HTTP collector; give one as in "
            "http://localhost:4318"
        )
    if found.username or found.password:
        raise ConfigError(
            "--otlp: other users can read command lines; leave the name and password out of the "
            "address and set OTEL_EXPORTER_OTLP_HEADERS=authorization=..."
        )
    for package in _PACKAGES:
        if not _is_there(package):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return text if found.path.strip("/") else f"{found.scheme}://{found.netloc}{_PATH}"


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
