"""Salvage of a lost worker's log: its tokens go back into the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import msgspec

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.samples.token_record import fold
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId
from holdfast.adapters.rl.server.messages import WorkerIdentity
from holdfast.adapters.shared.record_logs import LogReader, read_records
from holdfast.elastic.events import RolloutRecovered


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """The result of salvaging a log: ``samples`` found, ``unfinished`` ones to be continued.

    ``tokens`` were new to the ledger; ``resampled`` tokens had been reported and were not in the
    log.
    """

    samples: int
    unfinished: int
    tokens: int
    resampled: int

    def event(self, worker: str) -> RolloutRecovered:
        """Return it as the event of a lost worker, by seat."""
        return RolloutRecovered(
            worker=worker,
            samples=self.samples,
            unfinished=self.unfinished,
            tokens=self.tokens,
            resampled=self.resampled,
        )


def read_log(
    logs: LogReader, worker: WorkerIdentity, *, limit_s: float, over: Callable[[], bool]
) -> dict[SampleId, Delta]:
    """Return the log's part of each sample; empty if it cannot be read within ``limit_s``.

    ``over`` returns True once the log is not needed any more.
    """
    return read_records(logs, worker.log, fold, node=worker.node, limit_s=limit_s, over=over)


def take_over(
    ledger: Ledger,
    pieces: Mapping[SampleId, Delta],
    *,
    unfinished: Set[SampleId],
    reported: Mapping[SampleId, int],
) -> Salvaged:
    """Give the ledger the contents of a log.

    ``unfinished`` are the samples its worker had claimed, ``reported`` its token counts by sample.
    """
    before, open_ = ledger.counters.tokens_recovered, set(unfinished)
    for key, piece in pieces.items():
        prompt = ledger.prompt(key[0])
        if prompt is not None:
            trajectory = piece.whole(prompt)
            (open_.discard if ledger.plan.limits.finished(trajectory) else open_.add)(key)
            ledger.recover(trajectory)
    lost = sum(
        max(0, count - (len(pieces[key].logprobs) if key in pieces else 0))
        for key, count in reported.items()
    )
    ledger.counters.tokens_resampled += lost
    return Salvaged(
        samples=len(pieces),
        unfinished=len(open_),
        tokens=ledger.counters.tokens_recovered - before,
        resampled=lost,
    )
