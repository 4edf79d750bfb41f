"""Opening of a restore point's blocks on a thread, while the model is still being built.

All ranks of a node request every block from its sidecar at once, and the indexes of lost blocks
have to be decoded. Without this thread the ranks would wait for that after the model is built.
"""

from __future__ import annotations

import logging
import threading

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.recovery.memory_source import MemorySource

_log = logging.getLogger(__name__)


class Opening(Closing):
    """A `MemorySource` whose blocks a thread opens; `take` returns it."""

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
        except Exception as error:  # noqa: BLE001 - the restore opens again, and reports
            _log.info("opening ahead: %s", error)
        else:
            self._opened = True

    def take(self) -> MemorySource | None:
        """Wait until the blocks are open and return their source; None if opening failed.

        The wait ends with the generation, because it calls the source's ``poll``.
        """
        self._thread.join()
        if not self._opened:
            self.close()
        source, self._source = self._source, None
        return source

    def close(self) -> None:
        """Close a source that was not taken."""
        self._thread.join()
        source, self._source = self._source, None
        if source is not None:
            source.close()
