"""A rollout worker waits for weights that are still to come, but not for released ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.rollout import sampling_client
from holdfast.adapters.rl.rollout.worker import RolloutWorker
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.server.messages import Answer, ToldDigest, WorkerExchange
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.adapters.rl.weights.pull import RefusedWeightsError
from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import BackPressure, Event, VersionUnavailable, WeightsRefused, of_kind

GONE = NotFoundError("no protected snapshot of step 3 in memory; have [5, 6]")


class Sidecar:
    """Says how far protection has come."""

    address = "tcp://here"

    def __init__(self, protected: int) -> None:
        self.protected, self.requests = protected, 0

    def protected_step(self, *, generation: int, at_least: int, timeout_s: float) -> int:
        self.requests += 1
        return self.protected


class Pulls:
    """Stands for `pull`: the errors that it raises, and its calls."""

    def __init__(self, error: Exception) -> None:
        self.error, self.everywhere = error, list[bool]()
        self.avoided: list[frozenset[int]] = []
        self.versions: list[int] = []

    def __call__(
        self, names: Any, *, version: int, everywhere: bool, avoid: frozenset[int], **_: Any
    ) -> Any:
        self.versions.append(version)
        self.everywhere.append(everywhere)
        self.avoided.append(avoid)
        raise self.error


class SteppedTime:
    """Stands for `time`: it passes while somebody sleeps, and at no other moment."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    found = SteppedTime()
    monkeypatch.setattr(sampling_client, "time", found)
    return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, time: SteppedTime) -> Any:
    monkeypatch.setattr(sampling_client, "_PULL_LIMIT_S", 0.05)
    monkeypatch.setattr(sampling_client, "_MISSING_LIMIT_S", 0.2)
    events: list[Event] = []
    handed: list[int] = []
    record: Any = SimpleNamespace(number=2, restore=None)
    roster: Any = SimpleNamespace(generation=record)
    host: Any = SimpleNamespace(
        node="a",
        seat="rollout/0",
        incarnation="x",
        sidecar=Sidecar.address,
        key=RunKey.new(),
        roster=lambda: roster,
        beat=lambda **_: None,
        leaving=lambda: False,
        handed_over=lambda *, generation, step: handed.append(generation),
        emit=events.append,
        events=events,
        handed=handed,
        now=record,
    )
    config = msgspec.structs.replace(preset("tiny"), steps=5)
    made: Any = RolloutWorker(host, config, stopped=lambda: False)
    made._link = SimpleNamespace(generation=2, client=None)
    return made


def ask(worker: Any, monkeypatch: pytest.MonkeyPatch, *, protected: int, error: Exception) -> Pulls:
    pulls = Pulls(error)
    monkeypatch.setattr(sampling_client, "pull", pulls)
    worker._sidecar = Sidecar(protected)
    return pulls


def test_a_version_that_is_gone_is_looked_for_everywhere_and_given_back(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = ask(worker, monkeypatch, protected=6, error=GONE)
    assert worker._ready_for(3) is False
    assert pulls.everywhere[0] is False
    assert all(pulls.everywhere[1:])
    assert len(pulls.everywhere) < 10, "it pauses between attempts"
    (event,) = of_kind(worker._host.events, VersionUnavailable)
    assert event.version == 3
    assert "have [5, 6]" in event.why


def test_where_samples_go_on_under_newer_weights_the_newest_is_as_good_as_one_that_is_gone(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._engine.pinned = False
    pulls = ask(worker, monkeypatch, protected=6, error=GONE)
    assert worker._ready_for(3) is False
    assert pulls.versions[0] == 3
    assert set(pulls.versions[1:]) == {6}


def test_a_version_that_stays_gone_ends_the_worker_with_the_reason(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(worker, monkeypatch, protected=6, error=GONE)
    with pytest.raises(
        JobFailedError, match=r"version 3 cannot be fetched any more.*keep more snapshots"
    ):
        for _ in range(10):
            worker._ready_for(3)


def test_a_peer_that_never_answers_is_given_up_as_well(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(worker, monkeypatch, protected=6, error=PeerError("tcp://gone: no answer"))
    assert worker._ready_for(3) is False


def test_refused_weights_are_told_and_fetched_elsewhere(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RefusedWeightsError("not what was published", version=3, ranks=frozenset({1}))
    pulls = ask(worker, monkeypatch, protected=6, error=error)
    assert worker._ready_for(3) is False
    assert worker._engine.version is None, "nothing was sampled with them"
    assert pulls.avoided[0] == frozenset()
    assert set(pulls.avoided[1:]) == {frozenset({1})}
    refusals = of_kind(worker._host.events, WeightsRefused)
    assert [each.count for each in refusals] == [*range(1, len(refusals) + 1)]
    first = refusals[0]
    assert (first.version, first.avoided, first.why) == (3, (1,), "not what was published")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ToldDigest(leading=True, digest="abc"), ""),
        (ToldDigest(leading=True, why="it was rolled back"), "it was rolled back; ask again"),
        (ToldDigest(leading=False), "it does not lead"),
    ],
)
def test_the_leader_is_asked_for_the_digest(worker: Any, answer: ToldDigest, said: str) -> None:
    requests: list[Any] = []
    place = WeightsPlace(generation=1, step=6, version=4, slot=0)

    def call(op: str, body: Any) -> Any:
        requests.append((op, body))
        return msgspec.to_builtins(answer), []

    worker._link.client = SimpleNamespace(call=call)
    if said:
        with pytest.raises(PeerError, match=said):
            worker._published(place)
    else:
        assert worker._published(place) == "abc"
    assert requests == [("digest", {"generation": 2, "place": [1, 6, 4, 0]})]


def test_a_version_still_to_be_protected_is_waited_for_until_the_leader_changes(
    worker: Any, monkeypatch: pytest.MonkeyPatch, time: SteppedTime
) -> None:
    pulls = ask(worker, monkeypatch, protected=2, error=GONE)
    sidecar = worker._sidecar

    def protected_step(**_: Any) -> int:
        sidecar.requests += 1
        time.sleep(0.01)
        if sidecar.requests == 20:
            worker._host.now.number = 3
        return 2

    sidecar.protected_step = protected_step
    assert worker._ready_for(3) is False
    assert time.monotonic() > 0.1, "longer than it looks for one that is gone"
    assert not any(pulls.everywhere)
    assert worker._host.events == []


def test_a_version_of_the_generation_before_is_looked_for_everywhere(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that came after a recovery does not know the step that the others restored.

    It waited for that step to be protected anew, and the trainers for the samples of that version.
    """
    pulls = ask(worker, monkeypatch, protected=-1, error=GONE)
    worker._host.now.restore = "the point from which generation 2 began"
    sidecar = worker._sidecar

    def protected_step(**_: Any) -> int:
        sidecar.requests += 1
        if sidecar.requests == 5:
            worker._host.now.number = 3
        return -1

    sidecar.protected_step = protected_step
    assert worker._ready_for(2) is False
    assert pulls.everywhere == [False, True, True, True, True]
    assert worker._host.events == [], "it may still come"


class Leader:
    """Stands for the connection to a leader: gives its answers in turn, then empty ones."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.heard = list(answers), list[WorkerExchange]()

    def call(self, op: str, body: Any) -> tuple[Any, None]:
        self.heard.append(msgspec.convert(body, WorkerExchange))
        answer = self.answers.pop(0) if self.answers else Answer(leading=True)
        return msgspec.to_builtins(answer), None


def put_to_work(worker: Any, leader: Leader, *keys: tuple[int, int]) -> None:
    """Have it sample two tokens of each."""
    engine = worker._engine
    worker._link = SimpleNamespace(generation=2, client=leader)
    engine.load(dict(engine.policy.named_parameters()), version=0, generation=2)
    for ordinal, sample in keys:
        engine.put(Trajectory(ordinal=ordinal, sample=sample, prompt=(97, 62)))
    for _ in range(3):
        engine.tick()


def test_told_to_leave_it_hands_over_what_it_is_at_work_on_once_to_every_leader(
    worker: Any,
) -> None:
    leader = Leader(Answer(leading=False))
    put_to_work(worker, leader, (3, 0), (3, 1))
    running = worker._engine.running()
    assert all(len(each.tokens) == 2 for each in running)
    worker._leave()
    assert worker._host.events == [], "this one does not lead"
    worker._leave()
    worker._leave()
    assert [list(each.left) for each in leader.heard] == [running, running]
    assert worker._engine.idle
    assert worker._host.events == []
    assert worker._host.handed == [2]
    successor = Leader()
    worker._link = SimpleNamespace(generation=3, client=successor)
    worker._leave()
    assert list(successor.heard[0].set_aside) == running


def test_what_it_is_told_to_set_aside_goes_back_at_once_and_is_kept_until_it_is_trained(
    worker: Any, time: SteppedTime
) -> None:
    leader = Leader(
        Answer(leading=True, set_aside=((3, 1),), allowance=5),
        Answer(leading=True),
        Answer(leading=True, released=4),
    )
    put_to_work(worker, leader, (3, 0), (3, 1))
    first, second = worker._engine.running()
    worker._exchange()
    assert worker._engine.running() == [first]
    worker._next_exchange = time.monotonic()
    assert worker._due()
    worker._exchange()
    assert leader.heard[1].set_aside == (second,)
    assert (leader.heard[1].running, leader.heard[1].oldest) == (((3, 0, 2),), (0,))
    assert worker._holding() == [second, first]
    worker._exchange()
    assert leader.heard[2].set_aside == ()
    assert worker._holding() == [first]


def test_it_asks_again_after_as_many_tokens_as_it_is_allowed(
    worker: Any, time: SteppedTime
) -> None:
    leader = Leader(Answer(leading=True, allowance=3))
    put_to_work(worker, leader, *[(3, sample) for sample in range(8)])
    worker._exchange()
    worker._next_exchange = time.monotonic()
    worker._sampled = 2
    assert not worker._due()
    worker._sampled = 3
    assert worker._due()


def test_it_says_when_it_holds_as_much_as_it_may(worker: Any) -> None:
    worker._most_tokens = 4
    leader = Leader()
    put_to_work(worker, leader, (3, 0))
    worker._exchange()
    for _ in range(2):
        worker._engine.tick()
    worker._exchange()
    assert [each.full for each in leader.heard] == [False, True]
    assert worker._host.events == [BackPressure(because="worker", held_tokens=4)]
