"""The notice of a run to the runs of other policies: its newest version, and the groups it needs.

A thread of rank 0 keeps it up to date, also while a step takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast import elastic
from holdfast.adapters.rl.cast.others import meeting_of
from holdfast.adapters.rl.cast.rules import kept_from
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.server.meeting import Offer
from holdfast.adapters.rl.server.serving import record_of
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.elastic.errors import JobFailedError

_POLL_S: Final = 0.1
_LONG_POLL_S: Final = 0.2
_END_S: Final = 5.0


class RunNotice:
    """The notice of one generation, from now until `close`; others see by a lock that it is kept.

    ``address`` is that of the server that gives digests of the weights ``names``, and ``frozen`` is
    the digest of all frozen weights.
    """

    def __init__(
        self,
        run: elastic.Run,
        config: RLConfig,
        *,
        address: str,
        names: Sequence[str],
        frozen: str | None,
    ) -> None:
        session, record = elastic.session_of(run), record_of(run)
        self._config, self._join = config, config.join or ""
        self._client = SidecarClient(session.sidecar.address, session.key)
        self._meeting = meeting_of(self._join, config.policy)
        self._lock = self._meeting.lead(session.key)
        self._offer = Offer(
            run=record.snapshots.run,
            seed=session.seed,
            plan=config.plan,
            names=tuple(names),
            generation=record,
            leader=address,
            frozen=frozen,
            reached=run.completed if record.restore is not None else -1,
        )
        self._meeting.write(self._offer)
        self._failed = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="cast-notice", daemon=True)
        self._thread.start()

    @property
    def keeps(self) -> int:
        """The lowest step that this run may train again."""
        return self._offer.keeps

    def check(self) -> None:
        """Raise ``JobFailedError`` if another run trains this policy, or the directory is gone."""
        if self._failed:
            raise JobFailedError(self._failed)

    def end(self) -> None:
        """Tell the others that this run is over."""
        self._stop()
        self._meeting.end()

    def close(self) -> None:
        """Release the lock; the notice stays as it is."""
        self._stop()
        self._lock.release()

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def _keep(self) -> None:
        try:
            while not (self._over.is_set() or self._failed):
                self._renew()
        except OSError as error:
            self._failed = f"join={self._join}: the notice to other runs cannot be written: {error}"
        finally:
            self._client.close()

    def _renew(self) -> None:
        """Wait a moment for a newer version, and write the notice anew if anything changed."""
        config, offer = self._config, self._offer
        try:
            protected = self._client.protected_step(
                generation=offer.generation.number,
                at_least=offer.reached + 1,
                timeout_s=_LONG_POLL_S,
            )
            durable = self._client.durable_step() if config.root is not None else None
            newest = self._meeting.offer()
        except CkptError:  # the generation is over, or its sidecar is busy
            self._over.wait(_POLL_S)
            return
        if newest is not None and newest.run != offer.run:
            self._failed = (
                f"join={self._join}: another run trains policy {config.policy} since this one "
                "began; start one run for each policy"
            )
            return
        reached = max(offer.reached, protected)
        keeps = kept_from(protected=max(0, reached), durable=durable, every=config.checkpoint_every)
        found = msgspec.structs.replace(offer, reached=reached, keeps=keeps)
        is_newest = newest is None or newest.generation.number <= offer.generation.number
        if found != offer and is_newest and not self._over.is_set():
            self._meeting.write(found)
            self._offer = found
        if protected <= offer.reached:
            self._over.wait(_POLL_S)
