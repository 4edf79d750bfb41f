"""The words between a launcher's process and its starter: configuration, orders, replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.elastic.launch.config import LaunchConfig
from holdfast.elastic.launch.joint import JointConfig
from holdfast.elastic.membership.records import JobOutcome

KILL: Final = "kill"
LOSE: Final = "lose"
RETURN: Final = "return"


class ManagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher's part in a job whose launchers run its etcd, from the given program."""

    joint: JointConfig
    program: Path


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a launcher; without a ``managed`` part the job is its own."""

    config: LaunchConfig
    managed: ManagedPart | None = None


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


def encoded(order: LaunchOrder) -> bytes:
    """Return an order as JSON."""
    return msgspec.json.encode(order, enc_hook=str)


def decoded(data: bytes) -> LaunchOrder:
    """Return the order in JSON."""
    return msgspec.json.decode(data, type=LaunchOrder, dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)
