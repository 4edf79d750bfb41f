"""The weights of a policy of another run: from whoever of that run answers, in any generation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from doubles.cast_offers import offer

from holdfast.adapters.rl.cast import others
from holdfast.adapters.rl.cast.others import OtherPolicy, meeting_of
from holdfast.adapters.rl.server.meeting import Offer
from holdfast.adapters.rl.weights.pull import RefusedWeightsError
from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError

WEIGHTS = {"critic.weight": torch.ones(2)}


class Pulls:
    """Stands for `pull`: raises the errors one after the other, then gives the weights."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked = [*errors], list[tuple[str, Any]]()

    def __call__(self, names: Any, *, reader: Any, avoid: frozenset[int], **_: Any) -> Any:
        self.asked.append((reader.client.address, avoid))
        if self.errors:
            raise self.errors.pop(0)
        return SimpleNamespace(tensors=WEIGHTS)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OtherPolicy:
    def client(address: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(address=address, close=lambda: None)

    monkeypatch.setattr(others, "SidecarClient", client)
    monkeypatch.setattr(others, "Client", client)
    return OtherPolicy("critic", meeting_of(str(tmp_path), "critic"), retained=0)


def lead(tmp_path: Path, written: Offer) -> None:
    meeting = meeting_of(str(tmp_path), "critic")
    meeting.lead(RunKey.new())
    meeting.write(written)


def test_a_run_that_is_not_there_is_named(policy: OtherPolicy) -> None:
    assert policy.reached == -1
    with pytest.raises(NotFoundError, match="no run trains policy critic now"):
        policy.pull(0)


def test_after_a_sidecar_that_does_not_answer_another_is_asked(
    policy: OtherPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = Pulls(PeerError("gone"), NotFoundError("not yet"))
    monkeypatch.setattr(others, "pull", pulls)
    lead(tmp_path, offer())
    for error in (PeerError, NotFoundError):
        with pytest.raises(error):
            policy.pull(3)
    assert policy.pull(3) == WEIGHTS
    assert [address for address, _ in pulls.asked] == ["tcp://a", "tcp://b", "tcp://b"]


def test_blocks_that_were_refused_are_avoided_once(
    policy: OtherPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = Pulls(RefusedWeightsError("damaged", version=3, ranks=frozenset({1})))
    monkeypatch.setattr(others, "pull", pulls)
    lead(tmp_path, offer())
    with pytest.raises(RefusedWeightsError):
        policy.pull(3)
    policy.pull(3)
    policy.pull(4)
    assert [avoid for _, avoid in pulls.asked] == [frozenset(), {1}, frozenset()]


def test_a_new_generation_is_followed(
    policy: OtherPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "pull", Pulls())
    lead(tmp_path, offer(1))
    policy.pull(3)
    first = policy._road
    policy.pull(4)
    assert policy._road is first, "the same connections"
    lead(tmp_path, offer(2))
    policy.pull(4)
    assert policy._road is not None
    assert policy._road.offer.generation.number == 2


def test_another_frozen_weight_there_is_refused(policy: OtherPolicy, tmp_path: Path) -> None:
    lead(tmp_path, msgspec.structs.replace(offer(), frozen="abc"))
    with pytest.raises(ConfigError, match="the others' abc: give all of them the same"):
        policy.pull(3)


_LEADS = """
import sys
from pathlib import Path
from holdfast.adapters.rl.server.meeting import Meeting
from holdfast.ckpt.transport import RunKey
meeting = Meeting(sys.argv[1])
lock = meeting.lead(RunKey.new())
print("leads", flush=True)
sys.stdin.read()
"""


def test_versions_of_a_run_count_while_somebody_leads_it(
    policy: OtherPolicy, tmp_path: Path
) -> None:
    place = tmp_path / "runs" / "critic"
    with subprocess.Popen(
        [sys.executable, "-c", _LEADS, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == b"leads\n"
        meeting_of(str(tmp_path), "critic").write(offer(reached=3))
        assert policy.reached == 3
        leader.communicate()
    assert policy.reached == -1, "nobody gives digests now"
    found = policy.offer()
    assert found is not None
    assert msgspec.structs.replace(found, reached=3) == found
