"""Building of this node's parity rows: ask the columns' owners, encode, seal.

The holder of a row requests all its bytes, and so knows when it has them: a row is sealed once
every byte of every column is in it. A repeated request or answer changes nothing.

- Columns on this host are mapped and encoded in one pass, in runs that stay in the cache. Nothing
  is compared: to look at two steps costs more than to encode one. A row of one column is copied,
  and its checksums are the check.
- The other columns travel. Parity is linear, so a row may begin as a copy of the row of an earlier
  protected step. Then only the differences are sent, as the exclusive or of both steps. That needs
  every owner to have that step still, and is then done for columns of this host too. Otherwise
  whole columns are sent, and added to the row of the columns on this host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Container
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from time import perf_counter

from holdfast.ckpt.errors import (
    CapacityError,
    CkptError,
    CorruptError,
    GivenUpError,
    MismatchError,
    PeerError,
)
from holdfast.ckpt.memory.fixed_files import CAN_JOIN
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import ParityEntry
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.parity.erasure import codec_named
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotKey, SnapshotPhase
from holdfast.ckpt.sidecar.core.core import THREADS, Core, WaitingWork
from holdfast.ckpt.sidecar.core.links import Job, PeerQueue
from holdfast.ckpt.sidecar.core.messages import AskBytes, AskColumn, unparse
from holdfast.ckpt.sidecar.core.wire import PART_BYTES, split_checked
from holdfast.ckpt.sidecar.parity.changes import Range, batches
from holdfast.ckpt.sidecar.parity.copied_rows import Mirroring
from holdfast.ckpt.sidecar.parity.mapped import MappedColumn
from holdfast.ckpt.sidecar.parity.row_build import Build, Encoding, MovedError, parse_column
from holdfast.ckpt.sidecar.parity.rows import Parities, ParityRow, RowPlace, RowSize
from holdfast.ckpt.transport import Client
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

RETRY_S = 0.3
_MOST_OF_IT = 0.75
"""Above this changed share, columns are sent whole: a difference needs a read of two steps."""

_SHARE_BESIDE_MAPPED = 0.5
"""Below this changed share of the sent columns, mapped ones are read by differences too."""

NICE = 10
"""The niceness of encoding threads: trainers go first, but a row progresses beside busy ones."""


class Builder:
    """Builds rows for committed snapshots. ``link(node)`` is the queue to a node.

    ``on_sealed(entry)`` is called for every complete row.
    """

    def __init__(
        self,
        core: Core,
        parities: Parities,
        *,
        link: Callable[[str], PeerQueue],
        on_sealed: Callable[[ParityEntry], None],
    ) -> None:
        self._core, self._parities = core, parities
        self._link, self._on_sealed = link, on_sealed
        self._builds: dict[tuple[SnapshotKey, RowPlace], Build] = {}
        self.maps = SlotMaps()
        self._making = False
        self.priority = "not known yet"
        self._why: dict[tuple[SnapshotKey, RowPlace], str] = {}
        self._closed = threading.Event()
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._notes.submit(int)  # starts the pool's thread from here
        self._pool = ThreadPoolExecutor(
            THREADS, thread_name_prefix="encode", initializer=self._stand_back
        )

    def _stand_back(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self.priority = f"nice {NICE}"
        except OSError as error:
            self.priority = f"usual ({error.strerror})"

    # -- beginning and ending --------------------------------------------------------------------

    def begin(self, snapshot: Snapshot, geometry: Geometry) -> None:
        """Begin this node's rows of a committed snapshot; called under the core's lock."""
        places = geometry.rows_of(self._core.node)
        sizes = [self._size(snapshot.key, geometry, place) for place in places]
        self._parities.expect(sizes, keep=snapshot.world.keep)
        for place in places:
            if self._parities.get(snapshot.key, place) is None:
                base = self._base(snapshot.key, place)
                self._start(self._plan(snapshot.key, geometry, place, base=base))

    def _size(self, key: SnapshotKey, geometry: Geometry, place: RowPlace) -> RowSize:
        """Return the length of a row, with the fixed part of its very contents."""
        nbytes, fixed_bytes = geometry.row_bytes(place[0]), geometry.fixed_row_bytes(place[0])
        if not CAN_JOIN or not 0 < fixed_bytes < nbytes:
            return RowSize(nbytes=nbytes)
        words = f"{key[0]}/{place}/{geometry.columns(place[0])}/{geometry.fixed_parts(place[0])}"
        contents = blake2b(words.encode(), digest_size=8).hexdigest()
        fixed = self._parities.fixed_name(contents)
        return RowSize(nbytes=nbytes, fixed=fixed, fixed_bytes=fixed_bytes)

    def _plan(
        self,
        key: SnapshotKey,
        geometry: Geometry,
        place: RowPlace,
        *,
        base: ParityRow | None,
        by_wire: bool = False,
    ) -> Build:
        k, size = geometry.columns(place[0]), self._size(key, geometry, place)
        if size.fixed and not self._parities.use_fixed(size.fixed):
            size = RowSize(nbytes=size.nbytes)
        build = Build(
            key=key,
            place=place,
            geometry=geometry,
            codec=codec_named()(k, geometry.m),
            size=size,
            fixed=self._parities.fixed_sums(size.fixed),
            owners={},
            base=base,
            by_wire=by_wire,
        )
        build.owners = {
            column: geometry.nodes[geometry.node_of(place[0], column)]
            for column in range(k)
            if geometry.filled_bytes(place[0], column) > build.start
        }
        return build

    def _base(self, key: SnapshotKey, place: RowPlace) -> ParityRow | None:
        """Return the row of the newest protected step before ``key``, if it still exists."""
        snapshots = self._core.book.snapshots
        rows = [
            row
            for row in self._parities.sealed()
            if row.place == place and row.key[0] == key[0] and row.key[1] < key[1]
            if row.key in snapshots and snapshots[row.key].phase is SnapshotPhase.PROTECTED
        ]
        return max(rows, key=lambda row: row.key, default=None)

    def _start(self, build: Build) -> None:
        self._builds[build.key, build.place] = build
        for column, owner in build.owners.items():
            self._put(build, owner, self._asker(build, column))
        if not build.owners:
            self._work(build, self._finish, 0)

    def cancel(self, key: SnapshotKey | None = None) -> None:
        """Cancel the rows of a snapshot, or all; unmap other nodes' memory that is gone."""
        for at in [at for at in self._builds if key in (None, at[0])]:
            self._drop(self._builds.pop(at))
        for at in [at for at in list(self._why) if key in (None, at[0])]:
            self._why.pop(at, None)
        self.maps.prune()

    def _drop(self, build: Build) -> None:
        build.is_over = True
        with build.lock:
            file, build.file = build.file, None
        if build.size.fixed:
            self._parities.end_use(build.size.fixed)
        if file is not None:
            self._parities.give_back(file)

    def _again(self, build: Build, *, base: ParityRow | None = None, by_wire: bool) -> None:
        """Begin a row again, from nothing."""
        with self._core.lock:
            if build.is_over or self._builds.get((build.key, build.place)) is not build:
                return
            self._drop(build)
            self._start(
                self._plan(build.key, build.geometry, build.place, base=base, by_wire=by_wire)
            )

    def close(self) -> None:
        """Build no more, without waiting for running work."""
        self._closed.set()
        self.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._notes.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, Json]:
        """Return the rows in progress, reasons for unbuilt ones, and the threads' priority."""
        return {
            "rows_building": len(self._builds),
            "unprotected": {
                f"{key[0]}/{key[1]}": why for (key, _), why in sorted(self._why.copy().items())
            },
            "encode_priority": self.priority,
        }

    # -- work ------------------------------------------------------------------------------------

    def _is_wanted(self, build: Build) -> bool:
        return not (build.is_over or self._closed.is_set())

    def _put(self, build: Build, owner: str, job: Job) -> None:
        def run(client: Client) -> None:
            try:
                job(client)
            except PeerError as error:
                if error.peer_code in (GivenUpError.code, CorruptError.code):
                    self._note(build, str(error))
                raise

        self._link(owner).put(run, is_wanted=lambda: self._is_wanted(build))

    def _note(self, build: Build, why: str) -> None:
        at = (build.key, build.place)
        if not build.is_over and self._why.get(at) != why:
            self._why[at] = why
            _log.warning("%s: step %d is not protected: %s", self._core.node, build.key[1], why)

    def _work(
        self, build: Build, task: Callable[..., None], *arguments: object
    ) -> Future[None] | None:
        """Run a task on an encoding thread, and handle its errors there."""

        def run() -> None:
            try:
                if self._is_wanted(build):
                    task(build, *arguments)
            except MovedError:
                self._note_down(lambda: self._again(build, by_wire=True))
            except CapacityError as error:
                self._note(build, str(error))
                self._later(build)
            except CkptError as error:
                self._note(build, str(error))
            except Exception:  # this future is never read: a bug must show in the log; raised again
                _log.exception("%s: parity row %s failed", self._core.node, build.place)
                raise

        with contextlib.suppress(RuntimeError):  # shut down meanwhile
            return self._pool.submit(run)
        return None

    def _later(self, build: Build) -> None:
        """Try again later for room: snapshots are released, and memory may be enlarged."""
        timer = threading.Timer(RETRY_S, lambda: self._work(build, self._encode))
        timer.daemon = True
        timer.start()

    # -- asking ----------------------------------------------------------------------------------

    def _asker(self, build: Build, column: int) -> Job:
        body = AskColumn(
            generation=build.key[0],
            step=build.key[1],
            stripe=build.place[0],
            column=column,
            base=build.base.key[1] if build.base is not None else -1,
            host="" if build.by_wire else self._core.host,
            start=build.start,
        )

        def ask(client: Client) -> None:
            answer, frames = client.call("column", unparse(body))
            described = parse_column(build, column, answer, frames)
            with build.lock:
                if column in build.columns:
                    return
                build.columns[column] = described
                is_complete = len(build.columns) == len(build.owners)
            if is_complete:
                self._work(build, self._encode)

        return ask

    def _encode(self, build: Build) -> None:
        """Choose how to get the columns, which are all described, and begin."""
        mapped = {} if build.by_wire else self._map(build)
        sent = build.columns.keys() - mapped.keys()
        if mapped and build.base and _changed_share(build, sent) < _SHARE_BESIDE_MAPPED:
            self._note_down(lambda: self._again(build, base=build.base, by_wire=True))
            return
        file = self._parities.take(build.size)
        with build.lock:
            if build.is_over:
                self._parities.give_back(file)
                return
            build.file, build.view = file, file.row(build.nbytes)
        try:
            build.check_fixed()
        except CorruptError as error:
            self._note(build, str(error))
            self._parities.distrust_fixed(build.size.fixed)
            self._note_down(lambda: self._again(build, by_wire=build.by_wire))
            return
        if not mapped:
            self._send_for(build)
            return
        encoding = _encoding(build, mapped)
        for lo, hi in encoding.parts:
            self._work(build, self._encode_part, encoding, lo, hi)

    # -- by mapping ------------------------------------------------------------------------------

    def _map(self, build: Build) -> dict[int, MappedColumn]:
        """Map the columns that can be mapped."""
        found = {}
        for column, (answer, sums) in build.columns.items():
            if answer.host and answer.host == self._core.host:
                owner, run = build.owners[column], self._core.arena.run
                mapped = MappedColumn.open(answer, sums, self.maps, node=owner, run=run)
                if mapped is not None:
                    found[column] = mapped
        return found

    def _encode_part(self, build: Build, encoding: Encoding | Mirroring, lo: int, hi: int) -> None:
        began_s = perf_counter()
        read, checksum = encoding.encode(lo, hi)
        self._core.meters.add("exchange", perf_counter() - began_s, read)
        self._core.count("fragment_bytes_mapped", read)
        if checksum is None:
            return
        if len(encoding.columns) == len(build.columns):
            self._finish(build, checksum)
        else:
            self._send_for(build, mapped=encoding.columns)

    # -- over the wire ---------------------------------------------------------------------------

    def _send_for(self, build: Build, *, mapped: Container[int] = ()) -> None:
        """Request the missing bytes: the differences from the base, or everything.

        ``mapped`` columns are in the row already.
        """
        base = build.base
        if mapped or _changed_share(build, build.columns) > _MOST_OF_IT:
            base = None
        is_based = base is not None and build.begin_as(base)
        jobs = []
        for column, (answer, _) in build.columns.items():
            if column in mapped:
                continue
            filled = build.geometry.filled_bytes(build.place[0], column)
            whole: tuple[Range, ...] = ((build.start, filled),)
            ranges = whole if not is_based or answer.changed is None else answer.changed
            spared = filled - build.start - sum(hi - lo for lo, hi in ranges)
            self._core.count("fragment_bytes_spared", max(spared, 0))
            jobs += [(column, batch) for batch in batches(ranges, PART_BYTES)]
        with build.lock:
            build.missing = {(column, batch[0][0]) for column, batch in jobs}
            if not (is_based or mapped):
                build.begin_fresh(PART_BYTES)
        step = base.key[1] if is_based and base is not None else -1
        for column, batch in jobs:
            self._put(build, build.owners[column], self._fetcher(build, column, batch, step))
        if not jobs:
            self._complete(build)

    def _fetcher(self, build: Build, column: int, batch: tuple[Range, ...], base: int) -> Job:
        body = AskBytes(
            generation=build.key[0],
            step=build.key[1],
            stripe=build.place[0],
            column=column,
            ranges=batch,
            base=base,
        )
        owner, lengths = build.owners[column], [hi - lo for lo, hi in batch]

        def fetch(client: Client) -> None:
            try:
                answer, frames = client.call("column_bytes", unparse(body), bulk=True)
                parts = split_checked(answer, frames, lengths, origin=f"{owner}: column_bytes")
            except CorruptError as error:
                raise PeerError(str(error), peer_code=CorruptError.code) from error
            except PeerError as error:
                if error.peer_code == MismatchError.code:  # the base was released meanwhile
                    self._again(build, by_wire=build.by_wire)
                raise
            done = self._work(build, self._add, column, batch, parts)
            if done is not None:
                done.result()

        return fetch

    def _add(
        self, build: Build, column: int, batch: tuple[Range, ...], parts: list[memoryview]
    ) -> None:
        """Add a column's contribution; one that was added before changes nothing."""
        with build.lock, self._core.meters.timed("exchange", sum(map(len, parts))):
            if build.is_over or (column, batch[0][0]) not in build.missing:
                return
            build.add(column, batch, parts)
            build.missing.discard((column, batch[0][0]))
            is_complete = not build.missing
        if is_complete:
            self._complete(build)

    # -- sealing ---------------------------------------------------------------------------------

    def _complete(self, build: Build) -> None:
        self._finish(build, build.made_checksum())

    def _finish(self, build: Build, checksum: int) -> None:
        """Seal a complete row on the thread that informs others."""
        filled = build.filled_sums() if build.fills_fixed else None
        self._note_down(lambda: self._seal(build, checksum, filled))

    def _note_down(self, task: Callable[[], None]) -> None:
        """Run a task on the thread that informs others; it has the usual priority.

        A thread inherits the priority of the thread that starts it. So the consequences of a
        complete row (gossip, a checkpoint) must not be started by an encoding thread.
        """

        def run() -> None:
            try:
                task()
            except CkptError as error:
                _log.warning("%s: %s", self._core.node, error)
            except Exception:  # never read either, as in `_work`
                _log.exception("%s: noting a parity row failed", self._core.node)
                raise

        with contextlib.suppress(RuntimeError):  # shut down meanwhile
            self._notes.submit(run)

    def _seal(self, build: Build, checksum: int, filled: Sums | None) -> None:
        """Seal a complete row, unless it is not wanted any more.

        ``filled`` are the sums of the fixed part that it has filled.
        """
        entry = ParityEntry(
            generation=build.key[0],
            step=build.key[1],
            stripe=build.place[0],
            row=build.place[1],
            nbytes=build.nbytes,
            crc32c=checksum,
        )
        with self._core.lock:
            if build.is_over or self._builds.get((build.key, build.place)) is not build:
                return
            del self._builds[build.key, build.place]
            build.is_over = True
            self._why.pop((build.key, build.place), None)
            if build.size.fixed:
                self._parities.end_use(build.size.fixed, sums=filled)
            self._parities.seal(build.file, entry)
            self._on_sealed(entry)
            self._make_ahead()

    # -- files of later rows ---------------------------------------------------------------------

    def _make_ahead(self) -> None:
        """Make files for later rows, where some are missing: fresh pages take their time."""
        if not self._making and self._missing():
            self._making = True
            with contextlib.suppress(RuntimeError):  # shut down meanwhile
                self._core.submit(None, self._make, kind=WaitingWork.STORE)

    def _missing(self) -> RowSize | None:
        """Return the row for which a file is missing; None also where memory is scarce."""
        if (size := self._parities.missing()) is None:
            return None
        largest = max((slot.file.capacity for slot in self._core.slots.all()), default=0)
        return size if self._core.arena.free_bytes() >= size.nbytes + 2 * largest else None

    def _make(self) -> None:
        try:
            while not self._closed.is_set():
                with self._core.lock:
                    size = self._missing()
                if size is None:
                    return
                self._parities.make(size)
        except CapacityError as error:
            _log.info("%s: no row is made ahead: %s", self._core.node, error)
        finally:
            self._making = False


def _encoding(build: Build, mapped: dict[int, MappedColumn]) -> Encoding | Mirroring:
    """Choose the encoding of a row from mapped columns: a copy, where it has one column only."""
    if build.codec.k > 1:
        return Encoding(build, mapped)
    (column,) = mapped.values()
    try:
        runs = column.runs()
    except ValueError as error:  # unmapped, because its file was removed
        raise MovedError(f"the column of step {build.key[1]} was removed") from error
    return Encoding(build, mapped) if runs is None else Mirroring(build, mapped, runs)


def _changed_share(build: Build, columns: Collection[int]) -> float:
    """Return the share of some columns that differs from the base; 1 if it is unknown."""
    filled = changed = 0
    for column in columns:
        answer, _ = build.columns[column]
        if answer.changed is None:
            return 1.0
        filled += build.geometry.filled_bytes(build.place[0], column) - build.start
        changed += sum(hi - lo for lo, hi in answer.changed)
    return changed / filled if filled else 1.0
