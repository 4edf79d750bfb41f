"""The requests of a `MeetingStore` to a `MeetingPoint`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.ckpt.types import learn


class MeetingOp(StrEnum):
    """The operations; the values that they set or return travel as frames."""

    SET = "set"
    APPEND = "append"
    ADD = "add"
    COMPARE_SET = "compare_set"
    DELETE = "delete"
    CHECK = "check"
    AWAIT = "await"


class MeetingAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of every operation; each uses its own.

    AWAIT answers as soon as all ``keys`` are there, with their values if it ``wants`` them, and
    with False after ``seconds``.
    """

    keys: tuple[str, ...]
    amount: int = 0
    seconds: float = 0.0
    wants: bool = False


learn(globals())
