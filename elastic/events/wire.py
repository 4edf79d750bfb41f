"""Lines of JSON to events and back, and what was different in older versions. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from holdfast.ckpt import events as checkpoints
from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.events import ENVELOPE, VERSION, Event
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import islands, job, rollouts, training


def _kinds() -> Iterator[type[Event]]:
    for module in (job, training, checkpoints, rollouts, islands):
        for found in vars(module).values():
            own = isinstance(found, type) and found.__module__ == module.__name__
            if own and issubclass(found, Event) and found.tag():
                yield found


KINDS: Final[Mapping[str, type[Event]]] = MappingProxyType({kind.tag(): kind for kind in _kinds()})
"""Every kind of event by its name, in the order of the reference."""


_Kind = TypeVar("_Kind", bound=Event)


def of_kind(events: Iterable[object], kind: type[_Kind]) -> list[_Kind]:
    """Return the events of one kind, in their order."""
    return [event for event in events if isinstance(event, kind)]


class EventFormatError(HoldfastError):
    """A line of an event file is no event, or one of a newer version of Holdfast."""

    code = "HF031"
    remedy = "Read the file with the version of Holdfast that wrote it, or remove the damaged line."


class UserEvent(Event, frozen=True, kw_only=True):
    """An event of a user's own kind: ``run.emit(UserEvent(name="evaluated", fields={...}))``.

    On the line ``name`` is the kind and the fields lie beside it. A reader
    returns such an event for every kind that it does not know. Raises ``ConfigError`` for a name
    that is one of `KINDS`, and for fields with the names of the envelope's.
    """

    name: str
    """Name of the kind."""

    fields: dict[str, Json] = msgspec.field(default_factory=dict)
    """The fields of the kind."""

    def __post_init__(self) -> None:
        if not self.name or self.name in KINDS:
            raise ConfigError(
                f"the event name {self.name!r} is empty or one of Holdfast's kinds: choose "
                "another name"
            )
        if taken := self.fields.keys() & {*ENVELOPE, "kind"}:
            raise ConfigError(
                f"event {self.name!r} has fields {sorted(taken)}, which every event has: give them "
                "other names"
            )

    @property
    def kind(self) -> str:
        """The name of the event's kind."""
        return self.name


class _Head(msgspec.Struct, frozen=True):
    kind: str
    v: int = 1


_BEGIN: Final = '{"kind":'
"""The beginning of an event's line. Inside a text of another event its quotes are escaped."""

_scanner: Final = json.JSONDecoder()
_head: Final = msgspec.json.Decoder(_Head)
_decoders: Final = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def encode(event: Event) -> bytes:
    """Return an event as one line of JSON, without the newline."""
    if not isinstance(event, UserEvent):
        return msgspec.json.encode(event)
    envelope = {name: getattr(event, name) for name in ENVELOPE}
    return msgspec.json.encode({"kind": event.name, **envelope, **event.fields})


def decode(line: bytes | msgspec.Raw) -> Event:
    """Return the event on a line; raises ``EventFormatError`` where it is none.

    Fields that this version does not know are skipped; a kind that it does not know is a
    `UserEvent`.
    """
    try:
        head = _head.decode(line)
        if head.v == VERSION and (decoder := _decoders.get(head.kind)) is not None:
            return decoder.decode(line)
        return of_fields(msgspec.json.decode(line, type=dict[str, Any]))
    except msgspec.MsgspecError as error:
        raise EventFormatError(f"not an event: {error}; in {bytes(line)[:200]!r}") from error


def decode_line(line: bytes) -> list[Event]:
    """Return the events on a line of a file to which several processes append.

    The kernel may cut a write short if its process is killed, at the end of a page. The next event
    of another process follows then on the same line, and the beginning before it is left out.
    Raises ``EventFormatError`` for a line that is no event and in which none begins.
    """
    try:
        return [decode(line)]
    except EventFormatError:
        whole = [decode(part) for part in _wholes(line)]
        if not whole:
            raise
        return whole


def _wholes(line: bytes) -> Iterator[bytes]:
    """Yield the events that lie whole in a line."""
    text = line.decode(errors="replace")
    at = text.find(_BEGIN)
    while at >= 0:
        try:
            _, end = _scanner.raw_decode(text, at)
        except ValueError:
            at = text.find(_BEGIN, at + 1)
            continue
        yield text[at:end].encode()
        at = text.find(_BEGIN, end)


def of_fields(record: Mapping[str, Any]) -> Event:
    """Return the event that a mapping is, of this or an older version; raises as `decode`."""
    version = record.get("v", 1)
    if not record.get("kind"):
        raise EventFormatError(f"not an event: it has no kind; in {dict(record)}")
    if version > VERSION:
        raise EventFormatError(
            f"an event of version {version}; this Holdfast reads up to {VERSION}: read it with "
            "the one that wrote it"
        )
    fields = {**(_of_version_1(record) if version == 1 else record), "v": VERSION}
    if (kind := KINDS.get(str(fields["kind"]))) is not None:
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise EventFormatError(f"not an event: {error}; in {dict(record)}") from error
    own = {name: value for name, value in fields.items() if name not in (*ENVELOPE, "kind")}
    envelope = {name: fields[name] for name in ENVELOPE if name in fields}
    return UserEvent(name=fields["kind"], fields=own, **envelope)


_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "step": {"start": "start_s"},
    "weights_pulled": {"saved": "saved_bytes"},
    "rollout_tail": {
        "length_p50": "length_p50_tokens",
        "length_p95": "length_p95_tokens",
        "length_max": "length_max_tokens",
        "waited_s_p50": "waited_p50_s",
        "waited_s_p95": "waited_p95_s",
        "waited_s_max": "waited_max_s",
        "carried": "carried_tokens",
    },
}
"""Fields of version 1 that have got another name, by kind."""


def _of_version_1(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of version 1, which names no version, as one of version 2."""
    kind = str(record["kind"])
    renamed = {"t": "time_s", **_RENAMED.get(kind, {})}
    fields = {renamed.get(name, name): value for name, value in record.items()}
    if kind == "metric":  # its values lay beside the step
        kept = (*ENVELOPE, "kind", "step")
        values = {name: value for name, value in fields.items() if name not in kept}
        fields = {name: value for name, value in fields.items() if name in kept}
        fields["values"] = values
    return fields
