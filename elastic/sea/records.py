"""The records of a sea's logbook, and the works that islands publish. Pure values.

A record is one JSON file of the logbook, named by its number. Decoding is strict: an unknown field
or kind is an error, so that no version of Holdfast reads half of another's record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.types import learn
from holdfast.elastic.sea.settings import NAME, Islands, Quorum

Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Weight: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16,64}\Z")]
Island: TypeAlias = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]

Why: TypeAlias = Literal["done", "silent", "astray", "lost"]
"""The reasons to leave: its run is over; it was silent for long; its weights are not the sea's; its
state is lost, and it enters anew."""

_Kind = TypeVar("_Kind")


class SeaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all islands of a sea share; ``share`` None: a merge waits for all."""

    every: Number
    portions: Annotated[int, Meta(ge=1)]
    bits: Literal[4, 8, 16, 32]
    lr: float
    momentum: float
    share: float | None
    grace_s: float
    age_limit: Number
    founders: Annotated[int, Meta(ge=1)]
    least_every: Number | None = None
    data: Literal["own", "dealt"] = "own"
    topology: Literal["all", "pairs"] = "all"


class DealtData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data set that the logbook deals.

    An epoch has ``samples`` positions in an order, a description as JSON, which depends on
    ``seed``. After ``epochs`` of them there are no more; None: the islands train so many steps.
    """

    samples: Annotated[int, Meta(ge=1, lt=1 << 53)]
    order: str
    seed: int
    epochs: Annotated[int, Meta(ge=1)] | None = None


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained tensor of the sea."""

    name: str
    shape: tuple[Number, ...]


class _Numbered(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """A record of a logbook, by its number."""

    number: Number


class Founded(_Numbered, frozen=True, kw_only=True, tag="founded"):
    """The first record. ``digest`` is that of the first weights; ``dealt`` the data it deals."""

    settings: SeaSettings
    parameters: tuple[Parameter, ...]
    digest: Digest
    dealt: DealtData | None = None


class Entered(_Numbered, frozen=True, kw_only=True, tag="entered"):
    """An island takes part from the next merge on.

    ``tide`` is the number of merges that it has adopted. ``lineage`` is the number of the record
    with which the island took on the weights that its own work continues: this record's for an
    island that begins with the sea's weights, an older one's for an island that comes back with its
    state. ``weight`` counts until its first work is merged. ``need`` are the samples that it wants
    to have in hand beyond those of a merged work, where the logbook deals them.
    """

    island: Island
    tide: Number
    weight: Weight
    lineage: Number
    need: Number = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An island's work as a record names it: the payload by its digest, and its weight.

    ``base`` counts the merges of the portion that the island had adopted, ``state`` is the digest
    of the sea's weights and momentum of the portion as the island has them after these merges.
    ``step_us`` are the microseconds of a step of late, without waits for others; 0: not measured.
    ``trained`` counts the samples dealt to this lineage that the work has, and those before it.
    """

    island: Island
    weight: Weight
    digest: Digest
    base: Number
    state: Digest
    step_us: Number = 0
    trained: Number = 0


class Left(_Numbered, frozen=True, kw_only=True, tag="left", omit_defaults=True):
    """An island takes part no more.

    ``seen`` are the works of ``portion`` that show why, where its weights are not the sea's.
    ``last`` are its works of all portions for the last merge, of an island that met in pairs until
    the end of its run.
    """

    island: Island
    why: Why
    portion: Number = 0
    seen: tuple[Part, ...] = ()
    last: tuple[Part, ...] = ()


class Merged(_Numbered, frozen=True, kw_only=True, tag="merged"):
    """A tide is over: the works of ``parts`` are merged, each by its weight over ``whole``.

    ``whole`` is the weight of all members, present or not. If islands meet in pairs, it is a
    meeting: that of the two in ``parts``, or that of an island with itself, whose partner is gone.
    """

    tide: Number
    portion: Number
    parts: tuple[Part, ...]
    whole: Annotated[int, Meta(ge=1, lt=1 << 31)]


class Dealt(_Numbered, frozen=True, kw_only=True, tag="dealt"):
    """An island gets more samples between two merges that name it: ``upto`` in its lineage."""

    island: Island
    upto: Number


Record: TypeAlias = Founded | Entered | Left | Merged | Dealt


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An island's word beside a payload.

    ``tide`` counts all merges that the island had adopted when it took the payload, ``base`` those
    of the portion. ``lineage`` is that of its `Entered`. ``nbytes`` is the payload's size. The rest
    is as in `Part`. A work for the last merge has the portion of `portions.last_of`.
    """

    island: Island
    lineage: Number
    tide: Number
    portion: Number
    weight: Weight
    digest: Digest
    nbytes: Number
    base: Number
    state: Digest
    step_us: Number = 0
    trained: Number = 0

    @property
    def part(self) -> Part:
        """The work as a record names it."""
        return Part(
            island=self.island,
            weight=self.weight,
            digest=self.digest,
            base=self.base,
            state=self.state,
            step_us=self.step_us,
            trained=self.trained,
        )


def agreed(islands: Islands) -> SeaSettings:
    """Return the part of an island's settings that all islands share."""
    quorum = islands.wait if isinstance(islands.wait, Quorum) else None
    return SeaSettings(
        every=islands.every,
        portions=islands.portions,
        bits=islands.bits,
        lr=float(islands.outer.lr),
        momentum=float(islands.outer.momentum),
        share=None if quorum is None else float(quorum.share),
        grace_s=0.0 if quorum is None else float(quorum.grace_s),
        age_limit=islands.age_limit,
        founders=islands.founders,
        least_every=islands.least_every,
        data=islands.data,
        topology=islands.topology,
    )


def difference(
    founded: Founded,
    islands: Islands,
    parameters: Sequence[Parameter],
    *,
    dealt: DealtData | None = None,
) -> str:
    """Return the first thing in which an island differs from the sea, "" if there is none.

    ``founders`` may differ: the sea has as many as the first island said. ``dealt`` is the island's
    data set, if the logbook deals it.
    """
    own = agreed(islands)
    for name in SeaSettings.__struct_fields__:
        here, there = getattr(own, name), getattr(founded.settings, name)
        if here != there and name != "founders":
            return f"{name} is {here!r} here and {there!r} in the sea"
    for name in DealtData.__struct_fields__ if dealt is not None else ():
        here, there = getattr(dealt, name), getattr(founded.dealt, name)
        if here != there:
            return f"the {name} of the data is {here!r} here and {there!r} in the sea"
    if len(parameters) != len(founded.parameters):
        return f"{len(parameters)} parameters here and {len(founded.parameters)} in the sea"
    for mine, theirs in zip(parameters, founded.parameters, strict=True):
        if mine != theirs:
            return (
                f"parameter {mine.name!r} of shape {list(mine.shape)} here and {theirs.name!r} of "
                f"shape {list(theirs.shape)} in the sea"
            )
    return ""


def encode(record: Record | Work) -> bytes:
    """Return a record or a work as JSON, the same bytes for equal values."""
    return msgspec.json.encode(record, order="deterministic") + b"\n"


def decode_record(data: bytes, *, origin: str) -> Record:
    """Parse a record. Raises ``CorruptError`` naming ``origin`` and the field."""
    return _decode(data, Record, origin)  # type: ignore[arg-type]


def decode_work(data: bytes, *, origin: str) -> Work:
    """Parse a work. Raises ``CorruptError`` naming ``origin`` and the field."""
    return _decode(data, Work, origin)


def _decode(data: bytes, kind: type[_Kind], origin: str) -> _Kind:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{origin}: no record that this version of Holdfast reads: {error}; install the "
            "version that the other islands have, or restore the file"
        ) from error


learn(globals())
