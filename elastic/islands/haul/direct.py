"""Payloads that travel from island to island under the sea's key, without the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.addresses import own_addresses
from holdfast.elastic.channel.shared_key import expanded, shared_key
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.islands.haul.offers import PULL, Offers, Pull, PulledPiece
from holdfast.elastic.sea.records import Part

_log = logging.getLogger(__name__)

ANSWER_S: Final = 15.0
"""Seconds in which an island answers with the next piece."""

_AWAY_S: Final = 60.0
"""Seconds for which an island that failed is not asked again at the same address."""


def sea_key(path: str, *, run: RunKey) -> RunKey:
    """Return the sea's key in a file. Raises ``ConfigError`` if there is none, or the run's own."""
    file = expanded(path)
    if not Path(file).exists():
        raise ConfigError(
            f"{path}: there is no such key file; make it once with `holdfast islands key {path}`, "
            "and copy it to the machines of all islands"
        )
    found = shared_key(Path(file))
    if found == run:
        raise ConfigError(
            f"{path}: this is the key of the run, with which another island could read and command "
            f"it; make one of the sea's own with `holdfast islands key FILE`"
        )
    return found


class Direct:
    """One island's exchange of payloads with the others.

    ``host`` is the address of this machine, ``place`` the host and port at which others reach it;
    "" and 0 stand for that address and any port. ``address_of(island)`` returns the address of an
    island, "" if it is not known.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        host: str,
        place: tuple[str, int],
        lines: PacedLines,
        digest_of: Callable[[bytes], str],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key, self._lines, self._digest_of = key, lines, digest_of
        self._patience_s, self._clock = patience_s, clock
        self.address_of: Callable[[str], str] = _nowhere
        self._lock = threading.Lock()
        self._away: dict[str, float] = {}
        self.offers, self.address = self._listen(host, place)

    def _listen(self, host: str, place: tuple[str, int]) -> tuple[Offers | None, str]:
        """Serve this island's payloads, if its address can be bound."""
        name, port = place
        bound = name if name in own_addresses() else "*" if name else host
        try:
            offers = Offers(self._key, host=bound, port=port, up=self._lines.up)
        except PeerError as error:
            _log.warning("the payloads of this island go by the store alone: %s", error)
            return None, ""
        return offers, f"tcp://{name or host}:{offers.port}"

    def offer(self, digest: str, payload: bytes) -> None:
        """Serve a payload of this island."""
        if self.offers is not None:
            self.offers.offer(digest, payload)

    def ask(self, part: Part, nbytes: int) -> bytes | None:
        """Return the payload of another island, None if that does not give it.

        Trouble with it is only told. Raises ``StoreError`` when nobody needs the payload any more.
        """
        address = self.address_of(part.island)
        if not address or self._is_away(address):
            return None
        try:
            return self._pulled(address, part, nbytes)
        except PeerError as error:
            with self._lock:
                self._away[address] = self._clock() + _AWAY_S
            _log.warning(
                "the payload of %s comes by the store: %s; if that island lives, compare the key "
                "files, and see whether its address is reached from here",
                part.island,
                error,
            )
            return None

    def close(self) -> None:
        """Stop serving."""
        if self.offers is not None:
            self.offers.close()

    def _is_away(self, address: str) -> bool:
        now_s = self._clock()
        with self._lock:
            self._away = {each: until for each, until in self._away.items() if until > now_s}
            return address in self._away

    def _pulled(self, address: str, part: Part, nbytes: int) -> bytes | None:
        """Return a payload piece by piece, None if it is not there. Raises ``PeerError``."""
        client = Client(address, self._key, timeout_s=ANSWER_S, watch=True)
        try:
            with self._lines.down.transfer() as down:
                end_s, data = self._clock() + self._limit_s(nbytes), bytearray()
                while len(data) < nbytes:
                    if self._clock() > end_s:
                        raise PeerError(f"{address}: {len(data)} of {nbytes} bytes came in time")
                    pull = Pull(digest=part.digest, at=len(data))
                    body, frames = client.call(PULL, msgspec.to_builtins(pull), bulk=False)
                    if (piece := _piece(address, body, frames, size=nbytes)) is None:
                        return None
                    data += piece[: nbytes - len(data)]
                    down.pay(piece.nbytes)
        finally:
            client.close()
        if self._digest_of(bytes(data)) != part.digest:
            raise PeerError(f"{address}: its {nbytes} bytes are not those of {part.digest}")
        return bytes(data)

    def _limit_s(self, nbytes: int) -> float:
        """Return the seconds that a payload may take, or it comes by the store."""
        declared = self._lines.down.bytes_per_s
        return max(self._patience_s / 4, 2 * nbytes / declared if declared else 0.0)


def _piece(address: str, body: object, frames: list[memoryview], *, size: int) -> memoryview | None:
    try:
        found = msgspec.convert(body, PulledPiece).size
    except msgspec.ValidationError as error:
        raise PeerError(f"{address}: malformed answer: {error}") from error
    if found < 0:
        return None
    if found != size or len(frames) != 1 or not frames[0].nbytes:
        raise PeerError(f"{address}: it has {found} bytes of a payload of {size}, or none to give")
    return frames[0]


def _nowhere(_island: str) -> str:
    return ""
