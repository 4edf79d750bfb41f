"""Reading of a log by pages: from its writer's node, else from the longest of the newest copies.

Every record's checksum is verified on every read, at its source and at its destination. A record
that is damaged in one copy is taken from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, PeerError
from holdfast.ckpt.memory.records import SidecarPeer
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.messages import LogName, LogPage, LogRead, LogState, unparse
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.logs.frames import Frames, pack, parse, sound
from holdfast.ckpt.sidecar.logs.record_log import RecordLog
from holdfast.ckpt.transport import Client
from holdfast.ckpt.types import Json

ASK_TIMEOUT_S = 1.5
PAGE_BYTES = PART_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Records of a log that goes from ``base`` to ``end``."""

    base: int
    end: int
    frames: Frames

    def message(self) -> LogPage:
        """Return the message that describes the page beside its frames."""
        return LogPage(
            base=self.base, end=self.end, at=self.frames.first, count=len(self.frames.starts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    node: str
    state: LogState
    fetch: Callable[[LogRead], Page]


def read_here(core: Core, log: RecordLog, body: LogRead) -> Page:
    """Return a page of a log of this sidecar. Raises ``NotFoundError`` when it is dropped."""
    with core.lock:
        if log.closed:
            raise NotFoundError(f"log {log.name!r} of node {log.node} was dropped")
        base, end = log.base, log.end
        at = max(body.start, base)
        data, starts = log.raw(at, limit_bytes=PAGE_BYTES)
    if body.count is not None and body.count < len(starts):
        data, starts = data[: starts[body.count]], starts[: body.count]
    return Page(base=base, end=end, frames=sound(data, at, starts))


class LogFinder:
    """Finds a page of a log among the sidecars of the group."""

    def __init__(self, core: Core, body: LogRead, *, here: RecordLog | None) -> None:
        self._core, self._body, self._here = core, body, here
        self._node = body.node or core.node
        self._silent: set[str] = set()

    def find(self, peers: Mapping[str, SidecarPeer]) -> Page:
        """Return the page. Raises ``NotFoundError`` naming the nodes queried.

        Raises ``PeerError`` while a node that may have it does not answer, ``CorruptError`` for a
        record that is damaged in every copy.
        """
        core = self._core
        if self._here is not None and self._node == core.node:
            page = read_here(core, self._here, self._body)
            return page if _is_whole(page) else self._mend(page, self._sources(peers))
        sources = self._sources(peers)
        for source in sources:
            try:
                page = source.fetch(self._body)
            except (PeerError, CorruptError, NotFoundError):
                continue
            others = [each for each in sources if each is not source]
            return page if _is_whole(page) else self._mend(page, others)
        unheard = self._silent - {self._node} | {each.node for each in sources}
        if unheard:
            raise PeerError(
                f"log {self._body.name!r} of node {self._node} may be on {sorted(unheard)}, "
                "which do not answer; retry"
            )
        queried = sorted({core.node, *peers})
        raise NotFoundError(
            f"none of the nodes {queried} has log {self._body.name!r} of node {self._node}"
        )

    def newest_birth(self, peers: Mapping[str, SidecarPeer]) -> int:
        """Return the birth of the newest log of that name anywhere, 0 for none."""
        return max((each.state.birth for each in self._sources(peers)), default=0)

    def _sources(self, peers: Mapping[str, SidecarPeer]) -> list[_Source]:
        """Return the nodes that have the log: the writer's node, then the longest newest copies."""
        with ThreadPoolExecutor(max(1, min(len(peers), 16))) as pool:
            found = [each for each in pool.map(self._ask, peers.values()) if each is not None]
        if (here := self._here) is not None:
            with self._core.lock:
                state = LogState(birth=here.birth, base=here.base, end=here.end)
            found.append(
                _Source(
                    node=self._core.node,
                    state=state,
                    fetch=lambda body: read_here(self._core, here, body),
                )
            )
        found.sort(
            key=lambda each: (each.node == self._node, each.state.birth, each.state.end),
            reverse=True,
        )
        return [each for each in found if each.state.birth == found[0].state.birth]

    def _ask(self, peer: SidecarPeer) -> _Source | None:
        name = LogName(name=self._body.name, node=self._node)
        try:
            answer, _ = self._call(peer, "log_state", unparse(name))
            state = msgspec.convert(answer, LogState)
        except (CkptError, msgspec.ValidationError):
            self._silent.add(peer.node)
            return None
        if not state.birth:
            return None
        return _Source(node=peer.node, state=state, fetch=lambda body: self._fetch(peer, body))

    def _fetch(self, peer: SidecarPeer, body: LogRead) -> Page:
        message = msgspec.structs.replace(body, node=self._node)
        answer, frames = self._call(peer, "log_read_here", unparse(message), timeout_s=10.0)
        return page_of(answer, frames, origin=peer.address)

    def _call(
        self, peer: SidecarPeer, op: str, body: Json, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[Json, list[memoryview]]:
        client = Client(peer.address, self._core.key, timeout_s=timeout_s, watch=True)
        try:
            return client.call(op, body, bulk=op == "log_read_here")
        finally:
            client.close()

    def _mend(self, page: Page, others: list[_Source]) -> Page:
        """Return the page with its missing records taken from others."""
        records = []
        for index, record in page.frames.records():
            records.append(self._search(index, others) if record is None else record)
        holes = (page.frames.is_hole(n) for n in range(page.frames.first, page.frames.end))
        self._core.count("log_records_mended", sum(holes))
        return Page(base=page.base, end=page.end, frames=pack(records, page.frames.first))

    def _search(self, index: int, others: list[_Source]) -> bytes:
        one = msgspec.structs.replace(self._body, start=index, count=1)
        for source in others:
            if not source.state.base <= index < source.state.end:
                continue
            try:
                found = dict(source.fetch(one).frames.records()).get(index)
            except CkptError:
                continue
            if found is not None:
                return found
        raise CorruptError(
            f"record {index} of log {self._body.name!r} of node {self._node} is damaged in every "
            "copy; read on after it, or repeat the work that it recorded"
        )


def page_of(answer: Json, frames: list[memoryview], *, origin: str) -> Page:
    """Return the page in an answer. Raises ``CorruptError``, ``PeerError``."""
    try:
        message = msgspec.convert(answer, LogPage)
    except msgspec.ValidationError as error:
        raise PeerError(f"{origin}: malformed page of a log: {error}") from error
    if len(frames) != 1:
        raise CorruptError(f"{origin}: a page of a log without its records; retry")
    found = parse(frames[0], message.at, count=message.count, origin=origin)
    return Page(base=message.base, end=message.end, frames=found)


def _is_whole(page: Page) -> bool:
    frames = page.frames
    return not any(frames.is_hole(index) for index in range(frames.first, frames.end))
