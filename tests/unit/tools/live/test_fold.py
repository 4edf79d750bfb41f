"""The fold of a run's events: state, cost of recoveries, goodput, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import msgspec
import pytest
from large_run import BEGIN_S, generation, start, step, training

from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointFailed,
    Detected,
    Event,
    JobEnded,
    LedgerCounted,
    MetricsLogged,
    NodeExited,
    SidecarStarted,
    StragglerFound,
    StragglerOver,
    TideAdopted,
    TokensSampled,
    WeightsPulled,
    WorkerExited,
    WorkerStarted,
)
from holdfast.tools.live.fold import MOST_CHAPTERS, Fold
from holdfast.tools.live.view import RunView
from holdfast.tools.report.timeline import build
from holdfast.tools.show.node_status import NodeStatus

SEATS = tuple(f"trainer/{number}" for number in range(4))


def folded(events: Iterable[Event], *, now_s: float | None = None, **options: object) -> RunView:
    fold = Fold()
    fold.apply(events)
    return fold.view(now_s=fold.last_s if now_s is None else now_s, **options)  # type: ignore[arg-type]


def steps(first: int, last: int, generation: int, *, at_s: float) -> list[Event]:
    return [step(n, generation, at_s=at_s + 0.5 * (n - first + 1)) for n in range(first, last + 1)]


def killed(at_s: float, *, seat: str = "trainer/3") -> list[Event]:
    about = {"victim": seat, "why": "killed by SIGKILL", "node": "node3", "source": "agent"}
    return [
        Detected(what="exit", time_s=at_s, **about),
        WorkerExited(pid=5003, status="killed by SIGKILL", seat=seat, node="node3", time_s=at_s),
    ]


def hurt() -> list[Event]:
    """Return a run of four nodes that loses a trainer after step 10 and step 10 with it."""
    return [
        *start(4, begin_s=BEGIN_S),
        *steps(1, 10, 1, at_s=BEGIN_S + 10.1),
        *killed(BEGIN_S + 15.3),
        *generation(2, SEATS[:3], at_s=BEGIN_S + 15.5, restore_step=9),
        *steps(10, 20, 2, at_s=BEGIN_S + 15.6),
    ]


def test_a_run_that_starts_has_nodes_and_no_step() -> None:
    view = folded(list(start(4))[:9])
    assert (view.state, view.step, view.generation) == ("starting", 0, 0)
    assert [node.node for node in view.nodes] == ["node0", "node1", "node2", "node3"]
    assert {node.state for node in view.nodes} == {"spare"}


def test_all_train() -> None:
    view = folded([*start(4), *steps(1, 10, 1, at_s=BEGIN_S + 10.1)])
    assert (view.state, view.step, view.world, view.wanted) == ("training", 10, 4, {"trainer": 4})
    assert {node.state for node in view.nodes} == {"training"}
    assert view.goodput == pytest.approx(1.0)
    assert view.shares["startup"] == pytest.approx(10.1)


def test_a_loss_is_recovered_from_and_its_cost_told_by_phase() -> None:
    view = folded(hurt())
    found = view.recoveries[0]
    assert (found.generation, found.cause, found.victims) == (2, "loss", ("trainer/3",))
    assert (found.restore_step, found.restore_how, found.tier) == (9, "memory", "peer")
    assert found.agree_s == pytest.approx(0.2)
    assert found.reform_s == pytest.approx(0.05)
    assert found.restore_s == pytest.approx(0.05)
    assert found.reexecute_s == pytest.approx(0.5)
    assert found.total_s == pytest.approx(0.8)
    assert (found.steps_lost, view.steps_lost, view.losses) == (1, 1, 1)
    assert view.shares["re-executed"] == pytest.approx(0.5)
    assert view.shares["recovery"] == pytest.approx(0.3)
    assert sum(view.shares.values()) == pytest.approx(view.wall_s)


def test_the_shares_are_those_of_the_report_of_the_whole_run() -> None:
    events = [*hurt(), JobEnded(ok=True, node="launcher", time_s=BEGIN_S + 25)]
    mine, whole = folded(events).shares, build(events).shares
    for name in ("productive", "startup", "shutdown", "re-executed"):
        assert mine[name] == pytest.approx(whole[name], abs=0.01), name


def test_a_run_between_a_loss_and_its_next_step_recovers() -> None:
    events = hurt()[: -len(steps(10, 20, 2, at_s=0))]
    view = folded(events)
    assert view.state == "recovering"
    assert view.recoveries[0].total_s is None
    assert next(n.state for n in view.nodes if n.node == "node3") == "restoring"


def test_generations_without_a_step_are_part_of_the_next_recovery() -> None:
    view = folded(
        [
            *start(4),
            *steps(1, 10, 1, at_s=BEGIN_S + 10.1),
            *killed(BEGIN_S + 15.3),
            *generation(2, SEATS[:3], at_s=BEGIN_S + 15.5, restore_step=10),
            *generation(3, SEATS[:2], at_s=BEGIN_S + 16.5, restore_step=10),
            *steps(11, 12, 3, at_s=BEGIN_S + 16.6),
        ]
    )
    assert [each.generation for each in view.recoveries] == [3, 1]
    assert view.recoveries[0].total_s == pytest.approx(1.3)


def lost_node() -> list[Event]:
    """Return the run above whose third node is lost as a whole."""
    at_s = BEGIN_S + 21.2
    return [
        *hurt(),
        NodeExited(
            victim="node2",
            status="killed by SIGKILL",
            memory_kept=False,
            node="launcher",
            time_s=at_s,
        ),
        Detected(what="node_lost", victim="node2", node="node0", source="agent", time_s=at_s),
    ]


def test_a_lost_node_is_lost_until_it_is_heard_of_again() -> None:
    view = folded(lost_node())
    node = next(each for each in view.nodes if each.node == "node2")
    assert (node.state, node.losses) == ("lost", 1)
    assert not node.seats[0].alive
    about = {"node": "node2", "source": "agent", "time_s": BEGIN_S + 30}
    back = [SidecarStarted(pid=9, **about), WorkerStarted(pid=10, seat="trainer/2", **about)]
    node = next(each for each in folded([*lost_node(), *back]).nodes if each.node == "node2")
    assert (node.state, node.losses) == ("spare", 1)


def test_rollout_workers_that_die_are_no_loss_of_the_training() -> None:
    events = [*hurt()[:-11], *killed(BEGIN_S + 15.45, seat="rollout/0")]
    assert folded(events).recoveries[0].victims == ("trainer/3",)


def test_nodes_tell_what_is_protected_and_events_where_they_do_not() -> None:
    said = {"generation": 2, "protected": 19, "restore_point_age_s": 0.25, "bytes": {"parity": 7}}
    answer = NodeStatus(node="node0", sidecar=1, status=said)
    view = folded(hurt(), statuses={"node0": answer})
    told = view.protection
    assert (told.step, told.age_s, told.at_risk_steps, told.told_by) == (19, 0.25, 1, "nodes")
    assert told.parity_bytes == 7
    told = folded(hurt()).protection
    assert (told.step, told.told_by) == (19, "events")


def test_troubles_of_a_node_are_with_the_node() -> None:
    silent = NodeStatus(node="node1", sidecar=1, error="it does not answer")
    node = next(n for n in folded(hurt(), statuses={"node1": silent}).nodes if n.node == "node1")
    assert node.troubles == ("it does not answer",)
    assert not node.answered


def test_nodes_that_are_held_off_say_why() -> None:
    about = {"node": "node3", "seat": "trainer/3", "source": "agent", "time_s": BEGIN_S + 20}
    events = [*hurt(), WorkerStarted(pid=7, attempt=2, **about)]
    told = NodeStatus(node="node3", sidecar=1, held_off="it was lost twice")
    view = folded(events, statuses={"node3": told})
    node = next(each for each in view.nodes if each.node == "node3")
    assert (node.state, node.why) == ("held off", "it was lost twice")


def test_a_run_that_says_nothing_any_more_is_silent_since_its_last_event() -> None:
    view = folded(hurt(), now_s=BEGIN_S + 1e6)
    assert view.state == "silent"
    assert view.now_s < BEGIN_S + 30


def test_checkpoints_are_durable_or_failed_and_counted_once() -> None:
    told = {"seconds": 2.0, "bytes": 10, "bytes_per_s": 5}
    events: list[Event] = [
        CheckpointDone(step=10, node=node, time_s=BEGIN_S + 20, **told) for node in ("a", "b")
    ]
    events += [
        CheckpointFailed(
            step=20, error="disk full", in_a_row=1, fatal=False, newest=10, time_s=BEGIN_S + 30
        )
    ]
    found = folded(events).checkpoints
    assert (found.done, found.failed, found.in_a_row) == (1, 1, 1)
    assert (found.durable_step, found.durable_s) == (10, BEGIN_S + 20)
    assert [(row.step, row.state, row.why) for row in found.newest] == [
        (20, "failed", "disk full"),
        (10, "durable", ""),
    ]


def test_stragglers_are_over_when_they_keep_up_again() -> None:
    found = StragglerFound(
        victim="trainer/1",
        on="node1",
        why="slow",
        times=2.0,
        microbatch_s=1.0,
        others_s=0.5,
        waits=0.0,
        data=0.0,
        busy=1.0,
        computes=True,
        time_s=BEGIN_S + 20,
    )
    over = StragglerOver(victim="trainer/1", time_s=BEGIN_S + 30)
    assert folded([found]).stragglers[0].over_s is None
    assert folded([over, found]).stragglers[0].over_s == BEGIN_S + 30


def test_rollouts_have_staleness_by_the_oldest_weights_of_the_living() -> None:
    def worker(number: int, version: int) -> list[Event]:
        about = {"node": "node0", "seat": f"rollout/{number}", "time_s": BEGIN_S + 12}
        return [
            WorkerStarted(pid=number + 1, source="agent", **about),
            TokensSampled(tokens=100, sampling_s=1.0, logging_s=0.0, **about),
            WeightsPulled(
                generation=1,
                version=version,
                before=None,
                seconds=0.1,
                bytes=50,
                saved_bytes=0,
                digest="",
                **about,
            ),
        ]

    found = folded([*hurt(), *worker(0, 18), *worker(1, 15)]).rollouts
    assert found is not None
    assert (found.workers, found.tokens, found.staleness) == (2, 200, 5)
    assert (found.version_oldest, found.version_newest, found.pulled_bytes) == (15, 18, 100)
    assert folded(hurt()).rollouts is None


def test_an_island_has_its_tides_and_waits() -> None:
    tides = [
        TideAdopted(
            tide=n,
            portion=0,
            step=n * 10,
            islands=3,
            whole=6,
            named=True,
            state="",
            waited_s=0.5,
            fetched_bytes=fetched,
            time_s=BEGIN_S + n,
        )
        for n, fetched in ((1, 100), (2, 200), (3, 50))
    ]
    found = folded(tides).island
    assert found is not None
    assert (found.tide, found.waited_s, found.fetched_bytes) == (3, 1.5, 250)


def test_messages_have_the_reason_of_the_planner() -> None:
    messages = folded(hurt()).messages
    planned = next(each for each in messages if each.text.startswith("generation 2 is planned"))
    assert planned.reason == "generation 2: 3 trainers"
    assert any(each.text == "trainer/3 was killed by SIGKILL" for each in messages)


def test_a_long_run_needs_little_memory() -> None:
    tracemalloc.start()
    try:
        fold = Fold()
        for event in training(4, steps=9_000, lose_every=20):
            fold.apply([event])
        size_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    view = fold.view(now_s=fold.last_s)
    assert (view.step, view.steps_lost, view.losses) == (9_000, 450, 450)
    assert len(view.recoveries) <= MOST_CHAPTERS
    assert size_bytes < 12 << 20
    assert len(msgspec.json.encode(view)) < 512 << 10
    assert sum(view.shares.values()) == pytest.approx(view.wall_s)


def test_the_ledger_tells_its_own_states_and_the_newest_count_stays() -> None:
    counts = {"trained": 8, "dropped": 0, "awaited": 2, "samples": 9, "duplicates": 1}
    about = {"held_tokens": 70, "workers": 2, "staleness_most": 1, "node": "node0", **counts}
    newer = LedgerCounted(pending=3, running=2, ready=1, time_s=BEGIN_S + 9, **about)
    older = LedgerCounted(pending=9, running=9, ready=9, time_s=BEGIN_S + 4, **about)
    logged = MetricsLogged(step=4, values={"reward": 0.25}, time_s=BEGIN_S + 9, node="node0")
    view = folded([*training(1, steps=3), newer, older, logged])
    found = view.rollouts
    assert found is not None
    assert (found.pending, found.running, found.ready, found.trained) == (3, 2, 1, 8)
    assert (found.awaited, found.held_tokens, found.staleness_most) == (2, 70, 1)
    assert found.reward == 0.25
