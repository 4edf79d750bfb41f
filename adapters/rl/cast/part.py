"""The part of one run among runs that train one policy each, on the leader of a generation.

The lead samples: it admits prompts by the versions that the others have reached, and writes each
step's groups into the log before it trains on them. Every other run waits for them there. Groups of
the log are given to the ledger as if workers had delivered them, in the lead too when it goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast import elastic
from holdfast.adapters.rl.cast import rules
from holdfast.adapters.rl.cast.notice import RunNotice
from holdfast.adapters.rl.cast.others import OtherPolicies
from holdfast.adapters.rl.cast.step_log import StepLog, resampled
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.states import DeliveryVerdict
from holdfast.adapters.rl.policy.joining import require_same_settings
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.server.server import RolloutServer
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import Event, PolicyAwaited

_WAIT_S: Final = 0.05
_TAKEN: Final = (DeliveryVerdict.ACCEPTED, DeliveryVerdict.DUPLICATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastWays:
    """The ways from one run to the others: the log of steps, their policies, and its own notice.

    ``protected`` returns its newest protected step, -1 if none is known, and ``pause`` waits a
    moment for the others.
    """

    log: StepLog
    others: OtherPolicies
    notice: RunNotice
    protected: Callable[[], int]
    emit: Callable[[Event], None]
    pause: Callable[[], None]


def begin_part(
    run: elastic.Run,
    config: RLConfig,
    server: RolloutServer,
    *,
    ledger: Ledger,
    names: Sequence[str],
    frozen: str | None,
    prompt_of: Callable[[int], Tokens],
) -> CastPart:
    """Return the part of a run, and show the run to the others.

    Raises ``ConfigError`` for a run that cannot begin at its step, or has other settings.
    """
    session, store = elastic.session_of(run), open_store(Path(config.join or ""))
    log = StepLog(store)
    require_same_settings(store, msgspec.to_builtins(config))
    require_fit(log, run.completed, config)

    def protected() -> int:
        try:
            return session.sidecar.protected_step(generation=run.generation)
        except CkptError:  # the generation is over, or not adopted yet
            return -1

    ways = CastWays(
        log=log,
        others=OtherPolicies(config, frozen=frozen),
        notice=RunNotice(run, config, address=server.address, names=names, frozen=frozen),
        protected=protected,
        emit=session.emit,
        pause=lambda: time.sleep(_WAIT_S),
    )
    return CastPart(run, config, server, ledger=ledger, prompt_of=prompt_of, ways=ways)


def require_fit(log: StepLog, completed: int, config: RLConfig) -> None:
    """Raise ``ConfigError`` if a run cannot go on after so many ``completed`` steps."""
    first, end = log.span()
    if reason := rules.misfit(completed, first=first, end=end):
        raise ConfigError(f"join={config.join}: policy {config.policy}: {reason}")


class CastPart:
    """The part of the module's docstring, for one generation."""

    def __init__(
        self,
        run: elastic.Run,
        config: RLConfig,
        server: RolloutServer,
        *,
        ledger: Ledger,
        prompt_of: Callable[[int], Tokens],
        ways: CastWays,
    ) -> None:
        self._run, self._config, self._server = run, config, server
        self._ledger, self._prompt_of = ledger, prompt_of
        self._ways, self.log, self.others = ways, ways.log, ways.others
        self._notice = ways.notice
        _, self._end = self.log.span()
        self._filled = run.completed
        self._awaited: dict[str, int] = {}
        self._by = -1
        if config.leads:
            self._fill(run.completed)

    def close(self) -> None:
        """Stop telling the others anything."""
        self.others.close()
        self._notice.close()

    # -- steps -----------------------------------------------------------------------------------

    def ready(self, step: int) -> bool:
        """Say whether the groups of ``step`` are there; wait a moment for them."""
        self._notice.check()
        if not self._config.leads:
            return self._take(step)
        late = rules.behind(step, self.others.reached, **self._log)
        self._tell_awaited(late, version=rules.version_for(step, eta=self._config.staleness))
        self._fill(step)
        if self._by < 0 and not self._ledger.admitted:
            self._ways.pause()
            return False
        self._server.advance(self.admitted_by, protected=max(0, self._ways.protected()))
        return self._server.wait_batch(step, timeout_s=_WAIT_S) is not None

    @property
    def admitted_by(self) -> int:
        """The number of completed steps by which prompts are admitted, once a step is `ready`."""
        return max(0, self._by)

    def publish(self, step: int, groups: Sequence[Trajectory]) -> None:
        """Write the groups of a step into the log, unless they come from there."""
        if not self._config.leads or step < self._end:
            return
        self.log.publish(step, groups)
        self._end = step + 1
        offers = [other.offer() for other in self.others.each.values()]
        keeps = [self._notice.keeps, *(None if each is None else each.keeps for each in offers)]
        self.log.forget(rules.forgettable(keeps, end=self._end))

    # -- evaluation and end ----------------------------------------------------------------------

    def have(self, version: int) -> bool:
        """Say whether every other policy has reached a version; wait a moment for it."""
        self._notice.check()
        late = {name: each for name, each in self.others.reached.items() if each < version}
        self._tell_awaited(late, version=version)
        if late:
            self._ways.pause()
        return not late

    def ended(self) -> bool:
        """Say whether the lead has ended; wait a moment for it."""
        self._notice.check()
        lead = self.others.each[self._config.lead].offer()
        if lead is not None and lead.over:
            return True
        known = {self._config.lead: -1 if lead is None else lead.reached}
        self._tell_awaited(known, version=self._run.completed)
        self._ways.pause()
        return False

    def end(self) -> None:
        """Tell the others that this run is over."""
        self._notice.end()

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _log(self) -> dict[str, int]:
        return {"end": self._end, "eta": self._config.staleness}

    def _take(self, step: int) -> bool:
        """Give the ledger the groups of a step, if the log has them."""
        groups = self.log.read(step)
        if groups is None:
            self._ways.pause()
            return False
        with self._server.lock:
            self._ledger.admit(step, self._prompt_of)
            self._deliver(step, groups)
        self._by = step
        return True

    def _fill(self, step: int) -> None:
        """Admit prompts; give the ledger all groups among them that the log has.

        Both at once, so that no worker gets one of them.
        """
        self._by = rules.admissible(step, [*self.others.reached.values()], **self._log)
        if self._by < 0:
            return
        with self._server.lock:
            self._ledger.admit(self._by, self._prompt_of)
            upto = min(self._end, self._ledger.admitted // self._config.plan.fresh)
            for each in range(self._filled, upto):
                if (groups := self.log.read(each)) is None:
                    raise JobFailedError(
                        f"{self.log.store.where('steps')}: the groups of step {each} are gone; "
                        "start all policies anew with an empty directory"
                    )
                self._deliver(each, groups)
            self._filled = max(self._filled, upto)

    def _deliver(self, step: int, groups: Sequence[Trajectory]) -> None:
        for sample in resampled(groups, generation=self._run.generation):
            verdict = self._ledger.deliver(sample, again=True)
            if verdict not in _TAKEN:
                raise JobFailedError(
                    f"{self.log.store.where('steps')}: sample {sample.key} of step {step} is "
                    f"{verdict} here; give each job a directory of its own"
                )

    def _tell_awaited(self, late: Mapping[str, int], *, version: int) -> None:
        """Record for whom this run begins to wait: for a ``version`` of ``late`` policies."""
        for policy in self._awaited.keys() - late.keys():
            del self._awaited[policy]
        for policy, newest in late.items():
            if self._awaited.get(policy) != version:
                self._awaited[policy] = version
                self._ways.emit(
                    PolicyAwaited(
                        step=self._run.completed + 1, policy=policy, version=version, newest=newest
                    )
                )
