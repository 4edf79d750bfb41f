"""Whether a server answers: the process itself, by the way and with the key of every request."""

from __future__ import annotations

import zmq

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.transport.client import Client
from holdfast.ckpt.transport.keys import RunKey

PING = "__ping__"
"""Answered by the transport, whatever the handler is busy with."""


def answers(address: str, key: RunKey, *, timeout_s: float) -> bool:
    """Say whether the server at ``address`` answers within that time.

    One that is stopped does not, though its kernel accepts connections; nor does one of another
    run, or one at the far end of a connection that is cut in either direction.
    """
    try:
        client = Client(address, key, timeout_s=timeout_s, watch=True)
    except zmq.ZMQError:
        return False  # no address, or no sockets left here
    try:
        client.call(PING, bulk=False)
    except CkptError:
        return False
    finally:
        client.close()
    return True
