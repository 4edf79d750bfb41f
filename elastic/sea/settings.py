"""The settings of an island and of the sea that it belongs to. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal, TypeAlias

from holdfast.ckpt import checks, sizes
from holdfast.elastic.errors import ConfigError

Bits: TypeAlias = Literal[4, 8, 16, 32]
"""Bits of a payload for each number."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The names of islands: they are parts of file names."""

_PLACE: Final = re.compile(r"([A-Za-z0-9.-]{0,253})(?::(\d{1,5}))?")

_ONE = checks.count(1, remedy="give 1 or more")
_BITS: Final = (4, 8, 16, 32)


def _bits(value: object) -> str:
    is_one = isinstance(value, int) and not isinstance(value, bool) and value in _BITS
    return "" if is_one else "give 4, 8, 16 or 32"


def _name(value: object) -> str:
    if value == "" or (isinstance(value, str) and NAME.fullmatch(value)):
        return ""
    return "give up to 63 letters, digits, '.', '_' and '-' that begin with a letter or digit"


def _address(value: object) -> str:
    found = _PLACE.fullmatch(value) if isinstance(value, str) else None
    if found is not None and int(found[2] or 0) < 1 << 16:
        return ""
    return "give HOST, HOST:PORT or :PORT, at which the other islands reach this one"


_NESTEROV: Final[Mapping[str, checks.Rule]] = {
    "lr": checks.number(0, 100, above=True, remedy="give a number above 0, at most 100"),
    "momentum": checks.number(0, 0.9999, remedy="give a number from 0 to 0.9999"),
}
_QUORUM: Final[Mapping[str, checks.Rule]] = {
    "share": checks.number(0, 1, above=True, remedy="give a part of the sea, above 0, at most 1"),
    "grace_s": checks.number(0, checks.LONGEST_S, remedy="give 0 or more seconds"),
}


@dataclass(frozen=True, slots=True)
class Nesterov:
    """The outer step: the merged progress of islands is a gradient for Nesterov's momentum."""

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        checks.check_fields(self, _NESTEROV, error=ConfigError)


@dataclass(frozen=True, slots=True)
class Quorum:
    """A tide is merged once the islands there have ``share`` of the sea's weight.

    Then it waits ``grace_s`` seconds more for the others.
    """

    share: float
    _: KW_ONLY
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        checks.check_fields(self, _QUORUM, error=ConfigError)


_RATE: Final = "give a rate, as in '20Mbit/s' or '2.5MB/s', bytes per second as an int, or None"
_LEAST_PER_S: Final = 31_250
"""A quarter of a Mbit/s: object stores take no smaller parts than 5 MiB, within three minutes."""

_ISLANDS: Final[Mapping[str, checks.Rule]] = {
    "name": _name,
    "meet": checks.instance(str, remedy=f"give {checks.ROOTS}, as a string"),
    "every": checks.count(1, remedy="give 1 or more steps"),
    "least_every": checks.optional(checks.count(1, remedy="give 1 or more steps, or None")),
    "portions": _ONE,
    "overlap": checks.count(1, remedy="give 1 or more steps; a merge takes time"),
    "bits": _bits,
    "outer": checks.instance(Nesterov, remedy="give outer=holdfast.Nesterov(...)"),
    "wait": checks.either(
        "all", checks.instance(Quorum, remedy="give 'all' or holdfast.Quorum(...)")
    ),
    "patience_s": checks.number(
        0, checks.LONGEST_S, above=True, remedy="give a number of seconds above 0"
    ),
    "founders": _ONE,
    "age_limit": checks.count(0, remedy="give 0 or more merges"),
    "data": checks.one_of("own", "dealt"),
    "uplink": checks.size_or_none(remedy=_RATE),
    "downlink": checks.size_or_none(remedy=_RATE),
    "key": checks.instance(str, remedy="give the path of a key file, as a string"),
    "address": _address,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """This run's part in a sea: an island, which merges its weights with those of others.

    ``name`` tells the island from the others. ``meet`` is where they all meet: a directory,
    ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``. Both may be left to
    the command line (``holdfast run --island oslo --sea s3://bucket/sea``). Within ``every`` steps
    each of the ``portions`` of the weights is merged once: it is sent with ``bits`` per parameter,
    and the merge is adopted ``overlap`` steps later. ``outer`` is the step that the mean of all
    islands' progress makes.

    ``wait``: a merge waits for ``"all"`` islands, or for a `Quorum`. An island that is silent for
    ``patience_s`` is put out; it may come back. With a quorum, progress that is based on weights
    more than ``age_limit`` merges of a portion old is sent anew before it is merged. The first
    merge waits until ``founders`` islands are there.

    With ``least_every`` an island that is slower than others takes fewer steps between two tides,
    by the speeds that the records state, so that the others need not wait for it; ``every`` are the
    steps of the fastest, and nobody takes fewer than ``least_every``.

    ``data``: each island trains on its ``"own"`` data set, or in an order of its own; or the
    logbook deals the samples of one that all have (``"dealt"``), each of an epoch to one island.

    ``uplink`` and ``downlink`` declare this island's line, as in ``"20Mbit/s"``: payloads go no
    faster, so that they leave room for all else.

    With ``key``, the path of the sea's key file (``holdfast islands key FILE``), islands give each
    other their payloads without the store, where they reach each other. ``address`` is the
    ``HOST``, ``HOST:PORT`` or ``:PORT`` at which the others reach this island; by default its own
    address, at any port.
    """

    name: str = ""
    meet: str = ""
    every: int = 40
    portions: int = 4
    overlap: int = 5
    bits: Bits = 4
    outer: Nesterov = Nesterov()
    wait: Literal["all"] | Quorum = "all"
    patience_s: float = 600.0
    founders: int = 1
    age_limit: int = 4
    least_every: int | None = None
    data: Literal["own", "dealt"] = "own"
    uplink: str | int | None = None
    downlink: str | int | None = None
    key: str = ""
    address: str = ""

    def __post_init__(self) -> None:
        checks.check_fields(self, _ISLANDS, error=ConfigError)
        if self.every % self.portions:
            raise ConfigError(
                f"Islands(every={self.every}, portions={self.portions}): each portion has a tide "
                f"of its own; give a multiple of {self.portions} steps"
            )
        if self.overlap >= self.stride:
            raise ConfigError(
                f"Islands(every={self.every}, portions={self.portions}, overlap={self.overlap}): "
                f"the next tide begins after {self.stride} steps; give a smaller overlap, or a "
                f"larger every"
            )
        if self.least_every is not None:
            self._check_least(self.least_every)
        _ = self.bytes_per_s  # raises now if a rate is none

    def _check_least(self, least: int) -> None:
        given = f"Islands(every={self.every}, portions={self.portions}, least_every={least})"
        if least % self.portions or least > self.every:
            raise ConfigError(f"{given}: give a multiple of {self.portions}, at most {self.every}")
        if self.overlap >= least // self.portions:
            raise ConfigError(
                f"{given}: the next tide of a slow island begins after {least // self.portions} "
                f"steps, and overlap is {self.overlap}; give a smaller overlap, or a larger "
                "least_every"
            )

    @property
    def is_dealt(self) -> bool:
        """True if the logbook deals the samples."""
        return self.data == "dealt"

    @property
    def bytes_per_s(self) -> tuple[int, int]:
        """The declared rates up and down in bytes per second, 0 for none."""
        return self._rate("uplink"), self._rate("downlink")

    @property
    def place(self) -> tuple[str, int]:
        """The host and port at which others reach this island; "" and 0: they are not given."""
        host, _, port = self.address.partition(":")
        return host, int(port or 0)

    def _rate(self, name: str) -> int:
        """Return a declared rate. Raises ``ConfigError``."""
        if (value := getattr(self, name)) is None:
            return 0
        try:
            rate = sizes.parse_rate(value)
        except ValueError as error:
            raise ConfigError(f"Islands({name}={value!r}): {error}") from error
        if rate < _LEAST_PER_S:
            raise ConfigError(f"Islands({name}={value!r}): give 0.25Mbit/s or more")
        return rate

    @property
    def stride(self) -> int:
        """The steps from one tide to the next."""
        return self.every // self.portions
