"""Rank 0's part where sampling runs in the user's own processes: the server they attach to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from holdfast import elastic
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.policy.policy import parameter_names
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.server.meeting import Meeting, Offer
from holdfast.adapters.rl.server.messages import WorkerIdentity
from holdfast.adapters.rl.server.server import RolloutServer, Term, WorkerPatience
from holdfast.adapters.rl.weights.pull import own_reader, published
from holdfast.elastic.membership.records import GenerationRecord

_POLL_S = 0.05
_ANNOUNCE_S = 5.0


class Serving:
    """Leads one generation's samplers; ``silence_s`` as in `WorkerPatience`."""

    def __init__(
        self,
        run: elastic.Run,
        *,
        directory: str | Path,
        model: nn.Module,
        silence_s: float,
    ) -> None:
        self._run, self._names = run, parameter_names(model)
        self._session = elastic.session_of(run)
        self._meeting = Meeting(directory)
        self._lock = self._meeting.lead(self._session.key)
        patience = WorkerPatience(announce_s=_ANNOUNCE_S, silence_s=silence_s)
        self.server = RolloutServer(self._session.key, patience=patience)

    def begin(
        self,
        ledger: Ledger,
        prompt_of: Callable[[int], Tokens],
        *,
        former: tuple[WorkerIdentity, ...],
    ) -> None:
        """Salvage the logs of ``former`` workers, and offer work."""
        run, session, names = self._run, self._session, self._names
        ledger.resume(run.generation, restored=run.completed)
        term = Term(
            generation=run.generation,
            ledger=ledger,
            prompt_of=prompt_of,
            alive=self._meeting.alive,
            logs=session.sidecar,
            emit=session.emit,
            began=time.monotonic(),
            digest_of=lambda place: published(names, place, reader=own_reader(run)),
        )
        self.server.lead(term, former=former)
        record = record_of(run)
        offer = Offer(
            run=record.snapshots.run,
            seed=session.seed,
            plan=ledger.plan,
            names=tuple(names),
            generation=record,
            leader=self.server.address,
            policies=tuple(name for name in ledger.books.names if name),
        )
        self._meeting.write(offer)

    def gather(self, step: int) -> list[Trajectory]:
        """Admit the ordinals that ``step`` needs and wait for its samples."""
        run, found = self._run, None
        protected = self._session.sidecar.protected_step(generation=run.generation)
        self.server.advance(step, protected=max(0, protected))
        while found is None:
            run.check()
            found = self.server.wait_batch(step, timeout_s=_POLL_S)
        return found

    def train(self, step: int, samples: Sequence[Trajectory]) -> None:
        """Mark ``step`` as trained on ``samples``."""
        self._session.emit(self.server.train(step, samples, ()))

    def finish(self) -> None:
        """Tell samplers that no more work will come."""
        self.server.finish()
        self._meeting.end()

    def close(self) -> None:
        """Stop leading; samplers wait for the next leader."""
        self.server.close()
        self._lock.release()


def record_of(run: elastic.Run) -> GenerationRecord:
    """Return the record of the run's generation, once this process has received it."""
    session = elastic.session_of(run)
    while True:
        run.check()
        record = session.roster().generation
        if record is not None and record.number == run.generation:
            return record
        time.sleep(_POLL_S)
