"""A ZeroMQ context that can be dropped."""

from __future__ import annotations

from typing import Any

import zmq


class OwnContext(zmq.Context[zmq.Socket[bytes]]):
    """Ends with its sockets, also where the garbage collector ends it.

    ``zmq.Context`` knows its sockets weakly. When it is collected together with them it finds none
    to close, and waits for them to be closed, for ever, in whatever thread collects.
    """

    _own: list[zmq.Socket[bytes]]

    def socket(self, *args: Any, **kwargs: Any) -> zmq.Socket[bytes]:
        """Return a new socket."""
        made = super().socket(*args, **kwargs)
        if not self._shadow:
            self._own = [each for each in getattr(self, "_own", []) if not each.closed]
            self._own.append(made)
        return made

    def destroy(self, linger: int | None = None) -> None:
        """Close the sockets, then the context."""
        for each in getattr(self, "_own", []):
            if not each.closed:
                each.close(linger)
        super().destroy(linger)
