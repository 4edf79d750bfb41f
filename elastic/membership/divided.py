"""Records that name all nodes of a large job, divided into a head and parts. Pure.

The *head* stands under the record's key and is small: the difference from the record before it. It
is written by compare-and-set, so that it alone commits. The *parts* are the whole record under keys
of their own, which exist before the head. A node that has the record before takes over the
difference, and only one that has not reads the parts. A store that takes no large value, as etcd,
takes the parts of a record of any size.

A head and its parts name the revision of the record before it. So whoever has committed a head
knows which parts nobody can need any more: those against the same record or an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.differences import Divisible, difference_text
from holdfast.elastic.membership.packed import pack

PART_CHARS: Final = 512 << 10
"""The most characters of a part; etcd refuses a request of more than 1.5 MiB."""

MOST_DIFFERENCE_CHARS: Final = 512 << 10

_MARK: Final = "divided:"  # no JSON begins so, and no packed text
_JOB: Final = "/job/"
_DIGITS: Final = 20


class DividedHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of a divided record.

    ``digest`` is that of the text of the ``parts`` together. ``base`` is the revision of the record
    before it, 0 if there was none. ``difference`` is the text of that from it; empty if it is
    larger than the whole.
    """

    digest: str
    parts: int
    base: int
    difference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRecord:
    """The values to be written for a record: the ``parts`` by key, and then the ``head``."""

    head: str
    parts: Mapping[str, str]


def parts_prefix(run: str) -> str:
    """Return the prefix of the keys of all parts of a run."""
    return f"{run}/parts/"


def parts_of(key: str) -> str:
    """Return the prefix of the keys of parts of all records that stood under ``key``."""
    run, _, kind = key.rpartition(_JOB)
    return f"{parts_prefix(run)}{kind}/"


def divided(key: str, record: Divisible, *, base: int, before: Divisible | None) -> DividedRecord:
    """Divide the record that is to stand under ``key`` after that of revision ``base``.

    ``before`` is the record of that revision, None if there is none or it is not known.
    """
    text = pack(msgspec.json.encode(record).decode())
    difference = difference_text(record, before) if base and before else None
    if difference is not None:
        difference = pack(difference)
        if len(difference) > min(len(text), MOST_DIFFERENCE_CHARS):
            difference = None
    pieces = [text[at : at + PART_CHARS] for at in range(0, len(text), PART_CHARS)]
    head = DividedHead(digest=_digest(text), parts=len(pieces), base=base)
    keys = part_keys(key, head)
    line = msgspec.json.encode(head).decode()
    return DividedRecord(
        head=f"{_MARK}{line}\n{difference or ''}", parts=dict(zip(keys, pieces, strict=True))
    )


def head_of(key: str, value: str) -> DividedHead | None:
    """Return the head that stands under ``key``, None if the record there is not divided.

    Raises ``CoordinatorError`` for a head that is not readable.
    """
    if not value.startswith(_MARK):
        return None
    line, _, difference = value[len(_MARK) :].partition("\n")
    try:
        head = msgspec.json.decode(line, type=DividedHead)
    except ValueError as error:  # msgspec's are ValueErrors
        raise CoordinatorError(f"{key}: not a readable head of a record: {error}") from None
    return msgspec.structs.replace(head, difference=difference)


def part_keys(key: str, head: DividedHead) -> tuple[str, ...]:
    """Return the keys of the parts of the record whose head stands under ``key``, in order."""
    prefix = f"{parts_of(key)}{head.base:0{_DIGITS}}-{head.digest}/"
    return tuple(f"{prefix}{number}" for number in range(head.parts))


def lacking(values: Iterable[tuple[str, str]], *, follows: bool) -> tuple[str, ...]:
    """Return the keys of the parts that a reader of these keys and values needs besides.

    ``follows``: the reader has the records before them, and takes over the differences.
    """
    there, needed = set[str](), dict[str, None]()
    for key, value in values:
        there.add(key)
        head = head_of(key, value)
        if head is not None and not (follows and head.difference):
            needed.update(dict.fromkeys(part_keys(key, head)))
    return tuple(part for part in needed if part not in there)


def whole_text(key: str, head: DividedHead, parts: Mapping[str, str]) -> str:
    """Return the text of a whole record from its parts.

    Raises ``CoordinatorError`` if some are missing or damaged.
    """
    keys = part_keys(key, head)
    if missing := [each for each in keys if each not in parts]:
        raise CoordinatorError(f"{key}: {len(missing)} of its {len(keys)} parts are missing")
    text = "".join([parts[each] for each in keys])
    if _digest(text) != head.digest:
        raise CoordinatorError(f"{key}: its parts have another digest than {head.digest}")
    return text


def superseded(key: str, keys: Iterable[str], *, base: int, own: Iterable[str]) -> list[str]:
    """Return the keys of parts that nobody needs after a head was committed against ``base``.

    ``keys`` are those under `parts_of`, ``own`` those of the committed record.
    """
    prefix, kept = parts_of(key), set(own)
    found = []
    for each in keys:
        against = each.removeprefix(prefix).partition("-")[0]
        if each not in kept and against.isdecimal() and int(against) <= base:
            found.append(each)
    return found


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()


learn(globals())
