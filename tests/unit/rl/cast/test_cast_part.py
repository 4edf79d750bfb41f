"""The leader of a run among several: what the log has is trained on, by everyone and once."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.cast import part as parts
from holdfast.adapters.rl.cast.part import begin_part
from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.elastic.errors import ConfigError, JobFailedError

TEAM = msgspec.structs.replace(
    preset("tiny"),
    environment=EnvironmentConfig(factory="reviewed"),
    policies={"solver": PolicyConfig(), "critic": PolicyConfig()},
    groups=2,
    group=2,
    microbatches=4,
    eta=2,
    steps=8,
)


def sampled(ordinal: int, *, generation: int) -> list[Trajectory]:
    version = TEAM.plan.version_of(ordinal)
    return [
        Trajectory(
            ordinal=ordinal,
            sample=number,
            prompt=(1,),
            tokens=(5, 6),
            logprobs=(-1.0, -float(ordinal)),
            stamps=(Stamp(generation=generation, version=version, count=2),),
        ).replied((), state="null", reward=float(number))
        for number in range(2)
    ]


class Notice:
    """Stands for `RunNotice`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.keeps = 0

    def check(self) -> None:
        """Do nothing: nobody else trains this policy."""

    def close(self) -> None:
        """Do nothing."""


class Server:
    """Stands for `RolloutServer`: workers sample at once whatever is open, and count it."""

    address = "tcp://here"

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.lock = ledger, threading.RLock()
        self.generation = 1
        self.sampled: list[int] = []

    def advance(self, completed: int, *, protected: int) -> None:
        self.ledger.admit(completed, lambda _: (1,))
        for work in self.ledger.claim("worker", free=100, version=None):
            ordinal = work.trajectory.ordinal
            self.sampled.append(ordinal)
            self.ledger.deliver(
                sampled(ordinal, generation=self.generation)[work.trajectory.sample]
            )

    def wait_batch(self, step: int, *, timeout_s: float) -> list[Trajectory] | None:
        self.advance(0, protected=0)
        return self.ledger.batch(step)


class Played:
    """One run's part with a real ledger and log; ``reached`` are the others' versions."""

    def __init__(
        self,
        config: RLConfig,
        monkeypatch: pytest.MonkeyPatch,
        *,
        reached: int = -1,
        generation: int = 1,
    ) -> None:
        self.ledger, self.events = Ledger(config.plan), list[Any]()
        session: Any = SimpleNamespace(
            emit=self.events.append,
            sidecar=SimpleNamespace(protected_step=lambda *, generation: 0),
        )
        monkeypatch.setattr(parts.elastic, "session_of", lambda _: session)
        monkeypatch.setattr(parts, "RunNotice", Notice)
        monkeypatch.setattr(parts, "_WAIT_S", 0.0)
        self.ledger.resume(generation, restored=0)
        self.server = Server(self.ledger)
        self.server.generation = generation
        self.run: Any = SimpleNamespace(completed=0, generation=generation)
        self.reached = {"critic": reached}
        played = self

        class Others:
            def __init__(self, _: RLConfig, *, frozen: str | None) -> None:
                self.each: dict[str, Any] = {}

            @property
            def reached(self) -> dict[str, int]:
                return played.reached

        monkeypatch.setattr(parts, "OtherPolicies", Others)
        server: Any = self.server
        self.part = begin_part(
            self.run,
            config,
            server,
            ledger=self.ledger,
            names=[],
            frozen=None,
            prompt_of=lambda _: (1,),
        )

    def train(self) -> list[Trajectory] | None:
        """Make the next step if its groups are there; return them."""
        step = self.run.completed
        if not self.part.ready(step):
            return None
        found = self.server.ledger.batch(step)
        assert found is not None
        self.part.publish(step, found)
        self.ledger.train(step)
        self.run.completed += 1
        return found


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return msgspec.structs.replace(TEAM, join=str(tmp_path / "join"), policy="solver")


def test_the_lead_goes_on_up_to_the_lag_and_says_for_whom_it_waits(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Played(config, monkeypatch, reached=-1)
    assert lead.train() is None
    assert not lead.server.sampled, "nothing is sampled without a version of all"
    lead.reached = {"critic": 0}
    while lead.train() is not None:
        pass
    assert lead.run.completed == 3, "versions 0 sample the steps 0 to 2"
    assert lead.train() is None
    told = [(each.policy, each.step, each.version, each.newest) for each in lead.events]
    assert told == [("critic", 1, 0, -1), ("critic", 4, 1, 0)], "each once"
    lead.reached = {"critic": 1}
    assert lead.train() is not None


def test_a_run_that_does_not_lead_trains_on_what_the_lead_wrote(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Played(config, monkeypatch, reached=0)
    first = lead.train()
    critic = Played(msgspec.structs.replace(config, policy="critic"), monkeypatch, generation=5)
    found = critic.train()
    assert [each.stamps[0].generation for each in found or []] == [5] * 4
    assert [each.logprobs for each in found or []] == [each.logprobs for each in first or []]
    assert critic.train() is None, "the lead has not written it yet"
    lead.train()
    assert critic.train() is not None


def test_a_lead_that_goes_back_samples_nothing_again_that_the_log_has(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Played(config, monkeypatch, reached=2)
    before = [lead.train() for _ in range(5)]
    again = Played(config, monkeypatch, generation=2, reached=-1)
    after = [again.train() for _ in range(5)]
    for one, other in zip(before, after, strict=True):
        assert [each.tokens for each in one or []] == [each.tokens for each in other or []]
    assert not again.server.sampled
    assert again.train() is None, "the next step needs a version of the critic"
    assert [(each.step, each.newest) for each in again.events] == [(6, -1)]
    again.reached = {"critic": 5}
    assert again.train() is not None
    assert set(again.server.sampled) >= {10, 11}


def test_a_run_begins_only_where_the_log_has_its_groups(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Played(config, monkeypatch, reached=2)
    for _ in range(4):
        lead.train()
    lead.part.log.forget(2)
    with pytest.raises(ConfigError, match="policy critic: this run begins at step 0, and the"):
        Played(msgspec.structs.replace(config, policy="critic"), monkeypatch)


def test_groups_of_another_job_are_refused(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = Played(msgspec.structs.replace(config, policy="critic"), monkeypatch)
    critic.part.log.publish(0, sampled(400, generation=1))
    with pytest.raises(JobFailedError, match=r"sample \(400, 0\) of step 0 is unknown here"):
        critic.part.ready(0)


def test_other_settings_are_refused(config: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Played(config, monkeypatch)
    with pytest.raises(ConfigError, match="other settings: eta"):
        Played(msgspec.structs.replace(config, policy="critic", eta=1), monkeypatch)
