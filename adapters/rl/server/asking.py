"""The question for a version's digest, as a reader of weights asks the leader that published it."""

from __future__ import annotations

import msgspec

from holdfast.adapters.rl.server.messages import DIGEST, AskDigest, ToldDigest
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client


def ask_digest(leader: Client, place: WeightsPlace, *, generation: int) -> str:
    """Return the digest of weights by the leader of ``generation``.

    Raises ``PeerError`` if it gives none.
    """
    ask = AskDigest(generation=generation, place=place)
    body, _ = leader.call(DIGEST, msgspec.to_builtins(ask))
    reply = msgspec.convert(body, ToldDigest)
    if not reply.digest:
        why = reply.why if reply.leading else "it does not lead"
        raise PeerError(
            f"the leader reports no digest of version {place.version}: {why}; ask again"
        )
    return reply.digest
