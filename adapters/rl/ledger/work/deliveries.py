"""The side of a ledger that takes samples: finished ones, and the remains of others. Pure."""

from __future__ import annotations

from holdfast.adapters.rl.ledger.group import Group, agree
from holdfast.adapters.rl.ledger.states import DeliveryVerdict, OrdinalState
from holdfast.adapters.rl.ledger.work.holdings import LedgerHoldings
from holdfast.adapters.rl.samples.trajectory import Trajectory


class LedgerDeliveries(LedgerHoldings):
    """The deliveries of samples into open groups."""

    def deliver(self, trajectory: Trajectory, *, again: bool = False) -> DeliveryVerdict:
        """Take a finished sample. ``again``: it was probably taken before.

        When pinned, a duplicate must equal the first delivery; a different one is recorded as a
        violation.
        """
        if not self.valid(trajectory):
            self.counters.rolled_back += 1
            self.recover(trajectory)
            return DeliveryVerdict.ROLLED_BACK
        group = self._groups.get(trajectory.ordinal)
        known = group.done.get(trajectory.sample) if group else None
        if known is not None or (group is None and trajectory.ordinal < self._admitted):
            if self.plan.pinned and known and not agree(known, trajectory):
                self._note([f"sample {trajectory.key} was delivered in two versions"])
            self.counters.redelivered += again
            self.counters.duplicates_refused += not again
            return DeliveryVerdict.DUPLICATE
        if group is None or group.state is OrdinalState.DROPPED:
            return DeliveryVerdict.UNKNOWN
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return DeliveryVerdict.TOO_OLD
        self._charge(group, trajectory.sample, trajectory.sampled)
        self._accept(group, trajectory)
        self.counters.tokens_sampled += trajectory.sampled
        return DeliveryVerdict.ACCEPTED

    def recover(self, trajectory: Trajectory) -> DeliveryVerdict:
        """Take the remains of a sample: a finished one, or its beginning.

        Of a sample that continues into a rolled-back future, the tokens before that are taken.
        """
        trajectory = self._cuts.history(trajectory)
        if not trajectory.tokens:
            return DeliveryVerdict.UNKNOWN
        if self.plan.limits.finished(trajectory):
            verdict = self.deliver(trajectory, again=True)
        else:
            verdict = self._keep(trajectory)
        if verdict is DeliveryVerdict.ACCEPTED:
            self.counters.tokens_recovered += trajectory.sampled
        return verdict

    def set_aside(self, trajectory: Trajectory) -> DeliveryVerdict:
        """Take back an unfinished sample from a living worker; it or another continues it later.

        Like `recover`, but nothing was lost.
        """
        verdict = self._keep(self._cuts.history(trajectory))
        self.counters.samples_set_aside += verdict is DeliveryVerdict.ACCEPTED
        return verdict

    def _keep(self, trajectory: Trajectory) -> DeliveryVerdict:
        group = self._groups.get(trajectory.ordinal)
        if group is None or group.state is OrdinalState.DROPPED or not trajectory.tokens:
            return DeliveryVerdict.UNKNOWN
        if not group.longer(trajectory):
            return DeliveryVerdict.DUPLICATE
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return DeliveryVerdict.TOO_OLD
        self._charge(group, trajectory.sample, trajectory.sampled)
        self._groups.keep(trajectory)
        return DeliveryVerdict.ACCEPTED

    def _accept(self, group: Group, trajectory: Trajectory) -> None:
        complete = self._groups.accept(trajectory)
        self.counters.samples_accepted += 1
        if complete and self.plan.skips:
            self._unjudged.append(group.ordinal)
        elif complete:
            self._taking.complete(group.ordinal)
