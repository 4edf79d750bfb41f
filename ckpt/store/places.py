"""The addresses of checkpoints: from a path or URL to its store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError, StoreError
from holdfast.ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from holdfast.ckpt.store.base import Store
    from holdfast.ckpt.store.s3.config import S3Config

_STEP: Final = re.compile(r"step-(\d{12})")
SCHEMES: Final = frozenset({"file", "s3", "gs", "az"})
"""The schemes of a root that is no plain path."""

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(root: str | Path, *, s3: S3Config | None = None) -> Store:
    """Return the store at ``root``: a path, ``file://``, ``s3://``, ``gs://`` or ``az://``.

    ``s3`` configures the S3 server; without it the AWS variables of the environment do. Raises
    ``StoreError`` for a scheme that this version does not know.
    """
    _check(root)
    match scheme_of(root):
        case "":
            return LocalStore(root)
        case "file":
            return LocalStore(path_of(str(root)))
        case "s3":
            return _s3_store(str(root), s3)
        case "gs" | "az" as scheme:
            return _cloud_store(str(root), scheme)
        case scheme:
            raise StoreError(
                f"{root}: checkpoints at {scheme}:// are not supported by this version; use "
                f"{checks.ROOTS}"
            )


def scheme_of(root: str | Path) -> str:
    """Return the scheme of an address in lower case, empty for a path."""
    found = _URL.match(str(root))
    return found[1].lower() if found else ""


def locate(path: str | Path) -> tuple[str, int | None]:
    """Split a path or URL into the root and, where it names one step, the step.

    Raises ``ArgumentError`` for what is no path, and ``StoreError`` for a text that can be none.
    """
    _check(path)
    place = str(path).rstrip("/") if scheme_of(path) else str(Path(path).absolute())
    root, _, name = place.rpartition("/")
    if match := _STEP.fullmatch(name):
        return root or "/", int(match[1])
    return place, None


def _check(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        found = checks.shown(path)
        raise ArgumentError(f"the root is {found}; give {checks.ROOTS}")
    text = str(path)
    if not text:
        raise StoreError(f"an empty path; give {checks.ROOTS}")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise StoreError(f"{text!a}: {error.reason}; choose another path") from error
    if b"\0" in encoded:
        raise StoreError(f"{text!a}: a path has no null characters; choose another one")


def path_of(url: str) -> Path:
    """Return the path of a ``file:`` URL. Raises ``StoreError`` if it is another machine's."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise StoreError(
            f"{url}: names another machine, {parts.netloc}; write file:///path with three slashes, "
            "or mount it here"
        )
    return Path(unquote(parts.path))


def _s3_store(root: str, config: S3Config | None) -> Store:
    try:
        import boto3  # noqa: F401
    except ImportError as error:
        raise StoreError(
            f"{root}: boto3 is not installed, which s3:// needs; install holdfast[s3]"
        ) from error
    from holdfast.ckpt.store.s3.config import S3Config
    from holdfast.ckpt.store.s3.store import S3Store

    return S3Store(root, config or S3Config.from_environment(os.environ))


def _cloud_store(root: str, scheme: str) -> Store:
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise StoreError(
            f"{root}: obstore is not installed, which {scheme}:// needs; install holdfast[obstore]"
        ) from error
    from holdfast.ckpt.store.cloud.config import PROVIDERS, CloudConfig
    from holdfast.ckpt.store.cloud.store import CloudStore

    return CloudStore(root, CloudConfig.from_environment(PROVIDERS[scheme], os.environ))
