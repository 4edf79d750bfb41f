"""A check that a server's process answers, over the path and with the key of every request."""

from __future__ import annotations

from holdfast.ckpt.errors import CkptError, PeerError
from holdfast.ckpt.transport.client import Client
from holdfast.ckpt.transport.keys import RunKey

PING = "__ping__"
"""The operation that the transport itself answers, even while the handler is busy."""


def answers(address: str, key: RunKey, *, timeout_s: float) -> bool:
    """Say whether the server at ``address`` answers within ``timeout_s``.

    A stopped server does not, though its kernel accepts connections; nor does a server of another
    run, nor one behind a connection that is cut in either direction.
    """
    try:
        client = Client(address, key, timeout_s=timeout_s, watch=True)
    except PeerError:
        return False  # no address, or no sockets left
    try:
        client.call(PING, bulk=False)
    except CkptError:
        return False
    finally:
        client.close()
    return True
