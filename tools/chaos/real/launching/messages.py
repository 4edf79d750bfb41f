"""The words between a launcher's process and its starter: configuration, orders, replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.elastic.launch.config import LaunchConfig
from holdfast.elastic.membership.records import JobOutcome

KILL: Final = "kill"
LOSE: Final = "lose"
RETURN: Final = "return"


class RunBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The run that the launcher has begun or continued, and its coordinator's address."""

    run: str
    coordinator: str


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """The processes of a machine that vanished; none if it was gone already."""

    pids: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The outcome of the job."""

    outcome: JobOutcome


Reply = RunBegun | Lost | Ended


def encoded(config: LaunchConfig) -> bytes:
    """Return a configuration as JSON."""
    return msgspec.json.encode(config, enc_hook=str)


def decoded(data: bytes) -> LaunchConfig:
    """Return the configuration in JSON."""
    return msgspec.json.decode(data, type=LaunchConfig, dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)
