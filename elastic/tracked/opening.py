"""Open the blocks of a restore point while the model to restore into is still being built.

Every block is asked for at a sidecar that all ranks of the node ask at once, and lost ones have
their indexes decoded: time that would be waited for otherwise, once the model is there.
"""

from __future__ import annotations

import logging
import threading

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.recovery.memory_source import MemorySource

_log = logging.getLogger(__name__)


class Opening(Closing):
    """A `MemorySource` whose blocks a thread opens, for one who will `take` it, or nobody."""

    def __init__(self, source: MemorySource) -> None:
        self._source: MemorySource | None = source
        self.point = source.point
        self._opened = False
        self._thread = threading.Thread(
            target=self._open, args=(source,), name="open-blocks", daemon=True
        )
        self._thread.start()

    def _open(self, source: MemorySource) -> None:
        try:
            source.indexes()
        except Exception as error:  # noqa: BLE001 - whoever restores opens again, and tells
            _log.info("opening ahead: %s", error)
        else:
            self._opened = True

    def take(self) -> MemorySource | None:
        """Wait until the blocks are open and hand them over; None where they could not be had.

        The wait ends with the generation, as the source's ``poll`` is called in it.
        """
        self._thread.join()
        if not self._opened:
            self.close()
        source, self._source = self._source, None
        return source

    def close(self) -> None:
        """Close a source that nobody took."""
        self._thread.join()
        source, self._source = self._source, None
        if source is not None:
            source.close()
