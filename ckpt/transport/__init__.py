"""Authenticated request and reply between the processes of a run.

A `Server` answers requests; a `Client` sends them with a deadline. There are two paths, and an
answer takes the path of its request:

- *control*: ZeroMQ with CURVE. The handshake admits one client key (ZAP), and that key is in the
  run's key file. Every byte is encrypted by libsodium, at a few hundred megabytes a second.
- *bulk*: a second ZeroMQ socket of the same server without CURVE, whose messages are sealed with
  AES-GCM under the key of a session (`holdfast.ckpt.transport.envelope`,
  `holdfast.ckpt.transport.sealing`). Clients request sessions over the control path, so a process
  without the run key gets none.

A handler must not block: for long work it keeps the `Request` and calls `Request.reply` later, from
any thread. See docs/explanation/decisions/0007 for the guarantees.
"""

from holdfast.ckpt.transport.bulk_client import answers_refused
from holdfast.ckpt.transport.client import Client
from holdfast.ckpt.transport.keys import RunKey
from holdfast.ckpt.transport.limits import TransportLimits
from holdfast.ckpt.transport.ping import answers
from holdfast.ckpt.transport.pool import ClientPool
from holdfast.ckpt.transport.request import Handler, Request
from holdfast.ckpt.transport.server import Server

__all__ = [
    "Client",
    "ClientPool",
    "Handler",
    "Request",
    "RunKey",
    "Server",
    "TransportLimits",
    "answers",
    "answers_refused",
]
