"""The notice of a run tells how far it is, and by whom it was replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from doubles.cast_offers import offer

from holdfast.adapters.rl.cast import notice as notices
from holdfast.adapters.rl.cast.notice import RunNotice
from holdfast.adapters.rl.cast.others import meeting_of
from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import JobFailedError

DEADLINE_S = 30.0


class Sidecar:
    """Says how far protection and checkpoints have come."""

    protected, durable, is_fenced = -1, -1, False

    def protected_step(self, *, generation: int, at_least: int, timeout_s: float) -> int:
        if self.is_fenced:
            raise FencedError("the generation is over")
        return self.protected

    def durable_step(self) -> int:
        return self.durable

    def close(self) -> None:
        """Do nothing."""


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    made = Sidecar()
    session: Any = SimpleNamespace(
        sidecar=SimpleNamespace(address="tcp://here"), key=RunKey.new(), seed=3
    )
    monkeypatch.setattr(notices, "SidecarClient", lambda *_: made)
    monkeypatch.setattr(notices.elastic, "session_of", lambda _: session)
    monkeypatch.setattr(notices, "record_of", lambda run: offer(run.generation).generation)
    return made


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return msgspec.structs.replace(
        preset("tiny"),
        environment=EnvironmentConfig(factory="reviewed"),
        policies={"solver": PolicyConfig(), "critic": PolicyConfig()},
        checkpoint="root",
        checkpoint_every=2,
        join=str(tmp_path),
        policy="critic",
    )


@pytest.fixture
def notice(sidecar: Sidecar, config: RLConfig) -> Iterator[RunNotice]:
    run: Any = SimpleNamespace(completed=0, generation=2)
    made = RunNotice(run, config, address="tcp://leader", names=["critic.weight"], frozen=None)
    yield made
    made.close()


def test_it_follows_protection_and_checkpoints(
    notice: RunNotice, sidecar: Sidecar, tmp_path: Path
) -> None:
    meeting = meeting_of(str(tmp_path), "critic")

    def told() -> tuple[int, int]:
        found = meeting.offer()
        assert found is not None
        return found.reached, found.keeps

    assert told() == (-1, 0)
    sidecar.protected = 5
    until(lambda: told() == (5, 0))
    sidecar.durable = 6
    until(lambda: told() == (5, 4))
    sidecar.is_fenced = True
    notice.check()
    notice.end()
    found = meeting.offer()
    assert found is not None
    assert found.over


def test_a_run_of_the_same_policy_ends_the_one_before(notice: RunNotice, tmp_path: Path) -> None:
    newer = msgspec.structs.replace(offer(1), run="another")
    meeting_of(str(tmp_path), "critic").write(newer)
    until(lambda: bool(notice._failed))
    with pytest.raises(JobFailedError, match="another run trains policy critic since this one"):
        notice.check()


def test_the_notice_of_a_newer_generation_stays(
    notice: RunNotice, sidecar: Sidecar, tmp_path: Path
) -> None:
    meeting = meeting_of(str(tmp_path), "critic")
    meeting.write(offer(3, reached=9))
    sidecar.protected = 5
    notice.close()
    found = meeting.offer()
    assert found is not None
    assert (found.generation.number, found.reached) == (3, 9)
