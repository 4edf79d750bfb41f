"""The node of rank 0, which commits the checkpoints of a generation, and the messages to it."""

from __future__ import annotations

from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.links import send
from holdfast.ckpt.sidecar.core.messages import Message, Persisted, PersistProgress, unparse
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.sidecar.persist.pending import CheckpointJob
from holdfast.ckpt.types import Json


class Committer:
    """This node's access to the committing node."""

    def __init__(self, core: Core, exchange: ParityExchange) -> None:
        self._core, self._exchange = core, exchange

    @property
    def node(self) -> str:
        """The committing node's name; "" before the first generation."""
        world = self._core.book.world
        return world.rank_nodes[0] if world and world.rank_nodes else ""

    @property
    def is_here(self) -> bool:
        """True if this node is the committing node."""
        return self.node == self._core.node

    def tell(self, op: str, message: Message) -> None:
        """Send a message until it is answered, or the generation is over."""
        body = unparse(message)
        for peer in self._exchange.peers():
            if peer.node == self.node:
                self._exchange.link(peer, purpose="gossip").put(
                    lambda client: send(client, op, body)
                )

    def persisted(
        self, job: CheckpointJob, rank: int, *, receipt: Json, error: str | None
    ) -> Persisted:
        """Return the message about a rank's pack."""
        return Persisted(
            sent_in=self._core.book.generation,
            generation=job.key[0],
            step=job.step,
            rank=rank,
            receipt=receipt,
            error=error,
        )

    def progress(self, job: CheckpointJob) -> PersistProgress:
        """Return the message about this node's progress with a checkpoint."""
        return PersistProgress(
            sent_in=self._core.book.generation,
            generation=job.key[0],
            step=job.step,
            node=self._core.node,
            written_bytes=job.written_bytes,
        )
