"""The rollout server over real sockets, with simulated workers that only send messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.token_record import encode_deltas
from holdfast.adapters.rl.samples.trajectory import Delta, Stamp, Trajectory, TurnLimits
from holdfast.adapters.rl.server.messages import (
    DIGEST,
    EXCHANGE,
    Answer,
    AskDigest,
    ToldDigest,
    WorkerExchange,
    WorkerIdentity,
)
from holdfast.adapters.rl.server.server import (
    LedgerState,
    RolloutServer,
    Term,
    WorkerPatience,
    rollout_workers,
)
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import BackPressure, Event, RolloutLeft, RolloutRecovered, of_kind
from holdfast.elastic.membership.records import NodeRecord, Roster, WorkerRecord, WorkerState

LIMITS = TurnLimits(end=10, context=12, max_new_tokens=6)
PLAN = BatchPlan(groups=2, group=2, eta=1, steps=4, limits=LIMITS)
STAMP = (Stamp(generation=1, version=0, count=3),)


class World:
    """A server that leads generation 1, a roster that tests edit, and the logs of workers."""

    def __init__(self) -> None:
        self.key = RunKey.new()
        self.server = RolloutServer(
            self.key, patience=WorkerPatience(announce_s=0.5, silence_s=0.6)
        )
        self.alive: set[str] = set()
        self.logs: dict[tuple[str, str], list[bytes]] = {}
        self.events: list[Event] = []
        self.clients: list[Client] = []
        self.ledger = Ledger(PLAN)
        self.found: list[WeightsPlace] = []

    def digest_of(self, place: WeightsPlace) -> str:
        self.found.append(place)
        if place.version > 5:
            raise NotFoundError(f"version {place.version} is not kept")
        return f"{place.generation}/{place.version}"

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        try:
            return self.logs[name, node]
        except KeyError:
            raise NotFoundError(f"no log {name} of {node}") from None

    def log_drop(self, name: str, *, node: str) -> None:
        self.logs.pop((name, node), None)

    def roster(self) -> Roster:
        workers = tuple(
            WorkerRecord(seat="rollout/0", incarnation=i, pid=1, state=WorkerState.READY)
            for i in sorted(self.alive)
        )
        node = NodeRecord(
            node="n", incarnation="x", domain="n", sidecar="", slots={}, workers=workers
        )
        return Roster(nodes=(node,))

    def lead(self, generation: int = 1, former: tuple[WorkerIdentity, ...] = ()) -> None:
        term = Term(
            generation=generation,
            ledger=self.ledger,
            prompt_of=lambda ordinal: tuple(f"{ordinal}>".encode()),
            alive=lambda: rollout_workers(self.roster()),
            logs=self,
            emit=self.events.append,
            began=time.monotonic(),
            digest_of=self.digest_of,
        )
        self.server.lead(term, former=former)
        self.server.advance(self.ledger.trained_steps, protected=0)

    def client(self) -> Client:
        self.clients.append(Client(self.server.address, self.key, timeout_s=5))
        return self.clients[-1]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for client in world.clients:
        client.close()
    world.server.close()


def worker(name: str) -> WorkerIdentity:
    return WorkerIdentity(seat="rollout/0", incarnation=name, node="n")


def ask(client: Client, name: str, generation: int = 1, **fields: object) -> Answer:
    exchange = WorkerExchange(worker=worker(name), generation=generation, **fields)
    return msgspec.convert(client.call(EXCHANGE, msgspec.to_builtins(exchange))[0], Answer)


def finish(answer: Answer) -> tuple[Trajectory, ...]:
    return tuple(
        msgspec.structs.replace(
            a.trajectory, tokens=tuple(b"ab\n"), logprobs=(-1.0, -0.1, -2.5), stamps=STAMP
        )
        for a in answer.work
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_work_goes_out_and_a_batch_comes_back_with_every_bit(world: World) -> None:
    world.lead()
    client = world.client()
    first = ask(client, "w", free=8)
    assert first.leading
    assert len(first.work) == 8
    finished = finish(first)
    ask(client, "w", finished=finished, version=0, loaded_in=1)
    assert world.server.wait_batch(0, timeout_s=1) == sorted(finished[:4], key=lambda t: t.key)


def test_a_server_that_does_not_lead_says_so(world: World) -> None:
    client = world.client()
    assert not ask(client, "w", free=1).leading
    world.lead(generation=2)
    assert not ask(client, "w", generation=1, free=1).leading
    assert ask(client, "w", generation=2, free=1).leading


def test_an_idle_worker_is_answered_as_soon_as_there_is_work(world: World) -> None:
    world.lead()
    client, other = world.client(), world.client()
    work = ask(client, "w", free=8)
    assert not ask(other, "v", free=8).work  # after a long poll
    ask(client, "w", finished=finish(work), version=0, loaded_in=1)
    with world.server.lock:
        world.ledger.train(0)
    world.server.advance(1, protected=1)
    answer = ask(other, "v", free=8)
    assert {a.version for a in answer.work} == {1}
    assert answer.released == PLAN.groups


@pytest.mark.parametrize("how", ["exit", "silence"])
def test_the_work_of_a_lost_worker_is_handed_on_with_its_logged_tokens(
    world: World, how: str
) -> None:
    world.alive = {"w", "v"}
    world.lead()
    client, other = world.client(), world.client()
    ask(other, "v")
    ask(client, "w", free=2)
    ask(client, "w", running=((0, 0, 2), (0, 1, 3)), version=0, loaded_in=1)
    world.logs["rollout-0-w", "n"] = [
        encode_deltas(
            [
                Delta(
                    ordinal=0,
                    sample=0,
                    start=start,
                    tokens=tuple(tokens),
                    logprobs=(-0.25,) * len(tokens),
                    stamps=(Stamp(generation=1, version=0, count=len(tokens)),),
                )
            ]
        )
        for start, tokens in ((0, (97,)), (1, (98,)))
    ]
    until(lambda: ask(other, "v") is not None and bool(world.server._term.seen["w"].in_roster))
    if how == "exit":
        world.alive = {"v"}

    def recovered() -> bool:
        ask(other, "v")
        return bool(of_kind(world.events, RolloutRecovered))

    until(recovered)
    work = {a.trajectory.key: a.trajectory for a in ask(other, "v", free=8).work}
    assert (work[0, 0].tokens, work[0, 0].logprobs) == ((97, 98), (-0.25, -0.25))
    assert work[0, 1].tokens == ()
    event = of_kind(world.events, RolloutRecovered)[0]
    assert (event.tokens, event.resampled) == (2, 3)


def test_a_new_leader_waits_for_announcements_before_it_gives_work_away(world: World) -> None:
    world.alive = {"w", "v"}
    world.lead()
    client, other = world.client(), world.client()
    ask(client, "w")
    ask(other, "v")
    world.server.retire()
    world.ledger = Ledger(PLAN)
    world.lead(generation=2)
    assert not ask(client, "w", generation=2, free=2, version=0, loaded_in=1).work
    running = ((0, 0, 1), (0, 1, 1))
    answer = ask(other, "v", generation=2, running=running, free=1, version=0, loaded_in=1)
    assert not answer.abandon
    assert [a.trajectory.key for a in answer.work] == [(1, 0)]
    rest = ask(client, "w", generation=2, free=8, version=0, loaded_in=1)
    assert [a.trajectory.key for a in rest.work] == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_a_restored_ledger_remembers_whose_logs_still_matter(world: World) -> None:
    world.lead()
    ask(world.client(), "w", free=1)
    state = LedgerState(world.ledger, world.server).state_dict()
    again = LedgerState(Ledger(PLAN), world.server)
    again.load_state_dict(state)
    assert again.workers == (worker("w"),)
    world.server.retire()
    world.lead(generation=2, former=again.workers)
    until(lambda: bool(of_kind(world.events, RolloutRecovered)))


def test_weights_of_a_rolled_back_future_are_to_be_reloaded(world: World) -> None:
    world.ledger.resume(2, restored=0)
    world.lead(generation=2)
    client = world.client()
    running = ((0, 0, 1),)
    answer = ask(client, "w", generation=2, running=running, version=1, loaded_in=1)
    assert answer.reload
    assert not ask(client, "w", generation=2, running=running, version=0, loaded_in=1).reload


def test_nonsense_is_refused_and_the_server_lives_on(world: World) -> None:
    world.lead()
    client = world.client()
    with pytest.raises(PeerError, match="malformed exchange"):
        client.call(EXCHANGE, {"worker": 3})
    with pytest.raises(PeerError, match="'steal' is not known"):
        client.call("steal")
    assert ask(client, "w", free=1).leading


def test_workers_are_told_when_it_is_over(world: World) -> None:
    world.lead()
    world.server.finish()
    assert ask(world.client(), "w", free=8, running=()).over


def test_the_log_of_a_lost_worker_is_dropped_once_all_it_may_hold_is_trained(
    world: World,
) -> None:
    world.alive = {"w", "v"}
    world.lead()
    client, other = world.client(), world.client()
    ask(other, "v")
    ask(client, "w")
    world.logs["rollout-0-w", "n"] = []
    until(lambda: ask(other, "v") is not None and bool(world.server._term.seen["w"].in_roster))
    world.alive = {"v"}
    until(lambda: ask(other, "v") is not None and "w" in world.server._term.lost)
    until(lambda: not world.server._term.recovering)
    admitted = world.ledger.admitted // PLAN.groups
    world.server.advance(0, protected=admitted - 1)
    assert world.server.workers()[-1].incarnation == "w"
    assert world.logs
    world.server.advance(0, protected=admitted)
    until(lambda: not world.logs)
    assert {worker.incarnation for worker in world.server.workers()} == {"v"}
    assert world.server._term.announced == {"v"}  # workers may come and go for months


BOUNDED = msgspec.structs.replace(
    PLAN,
    mode=Mode.BOUNDED,
    scheduling=Scheduling(order=GroupOrder.ARRIVAL, over_provision=1.0, token_budget=8),
)


def begun(answer: Answer, count: int) -> tuple[Trajectory, ...]:
    """Return the work with so many tokens of each sample."""
    stamps = (Stamp(generation=1, version=0, count=count),)
    return tuple(
        msgspec.structs.replace(
            each.trajectory, tokens=(97,) * count, logprobs=(-1.0,) * count, stamps=stamps
        )
        for each in answer.work
    )


def told(trajectories: tuple[Trajectory, ...]) -> dict[str, object]:
    return {
        "running": tuple((*each.key, len(each.tokens)) for each in trajectories),
        "oldest": tuple(each.oldest for each in trajectories),
        "version": 0,
        "loaded_in": 1,
    }


def test_beyond_the_token_budget_workers_set_aside_what_the_next_step_can_do_without(
    world: World,
) -> None:
    world.ledger = Ledger(BOUNDED)
    world.lead()
    client, other = world.client(), world.client()
    first = ask(client, "w", free=8, version=0, loaded_in=1)
    assert (len(first.work), first.allowance) == (8, 8)
    running = begun(first, 1)
    answer = ask(client, "w", **told(running))
    assert answer.set_aside == ((2, 0), (2, 1), (3, 0), (3, 1))
    assert answer.allowance is None
    stopped = tuple(each for each in running if each.key in answer.set_aside)
    going_on = tuple(each for each in running if each.key not in answer.set_aside)
    ask(client, "w", set_aside=stopped, **told(going_on), free=4)
    assert not ask(other, "v", free=8).work, "until the next step has its groups"
    ask(client, "w", finished=finish(first)[:4], version=0, loaded_in=1)
    samples = world.server.wait_batch(0, timeout_s=1)
    assert samples is not None
    tail = world.server.train(0, samples, [0.0] * len(samples))
    assert (tail.ordinals, tail.carried_tokens, tail.length_max_tokens) == ((0, 1), 4, 3)
    again = {a.trajectory.key: a.trajectory for a in ask(other, "v", free=4).work}
    assert list(again.values()) == list(stopped)
    pressures = [event.because for event in of_kind(world.events, BackPressure)]
    assert pressures == ["budget", "none"]


def test_a_worker_that_leaves_hands_over_what_it_has_and_its_log_is_not_read(
    world: World,
) -> None:
    world.alive = {"w", "v"}
    world.lead()
    client, other = world.client(), world.client()
    ask(other, "v")
    running = begun(ask(client, "w", free=8), 2)
    ask(client, "w", **told(running))
    (ended, *left) = running
    ended = msgspec.structs.replace(
        ended, tokens=tuple(b"ab\n"), logprobs=(-1.0, -0.1, -2.5), stamps=STAMP
    )
    ask(client, "w", left=tuple(left), finished=(ended,), leaving=True)
    assert [a.trajectory for a in ask(other, "v", free=8).work] == left
    world.alive = {"v"}
    ask(other, "v")
    (event,) = of_kind(world.events, RolloutLeft)
    assert (event.samples, event.tokens) == (7, 14)
    assert world.ledger.counters.workers_left == 1
    assert world.ledger.counters.workers_lost == 0
    assert "w" in world.server._term.lost, "another leader may need its log"
    world.server.retire()
    world.ledger = Ledger(PLAN)
    world.lead(generation=2, former=(worker("w"),))
    assert world.ledger.held_tokens == 3 + 14, "it has what was handed over, in the next term too"
    assert {event.kind for event in world.events} - {"ledger"} == {"rollout_left"}


def digest(client: Client, version: int, *, of: int = 1, generation: int = 2) -> ToldDigest:
    place = WeightsPlace(generation=of, step=version, version=version)
    ask = AskDigest(generation=generation, place=place)
    return msgspec.convert(client.call(DIGEST, msgspec.to_builtins(ask))[0], ToldDigest)


def test_a_versions_digest_is_found_once_and_told_to_all(world: World) -> None:
    world.lead(generation=2)
    for client in (world.client(), world.client()):
        assert digest(client, 0) == ToldDigest(leading=True, digest="1/0")
    assert world.found == [WeightsPlace(generation=1, step=0, version=0)]
    assert digest(world.client(), 0, of=2).digest == "2/0"


def test_a_digest_that_is_not_to_be_had_comes_with_the_reason(world: World) -> None:
    client = world.client()
    assert digest(client, 0) == ToldDigest(leading=False)
    world.lead(generation=2)
    assert not digest(client, 0, generation=1).leading
    assert digest(client, 6).why == "version 6 is not kept"
    with world.server.lock:
        world.ledger.resume(2, restored=0)
    assert digest(client, 1, of=1).why == "it was rolled back"
    assert digest(client, 1, of=2).digest == "2/1"


def test_the_server_knows_with_what_weights_its_workers_sample(world: World) -> None:
    world.lead(generation=1)
    ask(world.client(), "w", version=2, loaded_in=1)
    ask(world.client(), "v")
    (found,) = world.server.consumers()
    assert (found.name, found.generation, found.version) == ("w", 1, 2)


def test_groups_of_equal_rewards_are_replaced_and_too_many_of_them_end_the_wait(
    world: World,
) -> None:
    plan = msgspec.structs.replace(PLAN, eta=0, scheduling=Scheduling(skip_equal=2))
    equal = {0}
    world.ledger = Ledger(
        plan, reward_of=lambda each: 0.5 if each.ordinal in equal else float(each.sample)
    )
    world.lead()

    def deliver() -> set[int]:
        work = world.ledger.claim("w", free=9, version=None)
        for each in work:
            stamp = Stamp(generation=1, version=each.version, count=3)
            done = msgspec.structs.replace(
                each.trajectory, tokens=(97, 98, 10), logprobs=(-1.0,) * 3, stamps=(stamp,)
            )
            world.ledger.deliver(done)
        return {each.trajectory.ordinal for each in work}

    assert deliver() == {0, 1}
    assert world.server.wait_batch(0, timeout_s=0.01) is None
    assert deliver() == {2}
    batch = world.server.wait_batch(0, timeout_s=0.01)
    assert batch is not None
    assert [each.key for each in batch] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    tail = world.server.train(0, batch, (0.0, 1.0) * 2)
    assert tail.length_max_tokens == 3
    assert world.ledger.counts()["skipped"] == 1
    equal |= set(range(99))
    world.server.advance(1, protected=0)
    with pytest.raises(
        JobFailedError, match=r"step 2 passed over 4 groups, which skip_equal=2 allows"
    ):
        while deliver():
            world.server.wait_batch(1, timeout_s=0.01)
