"""The parts of a soak that need no job: drawn faults, promises, counts."""

from __future__ import annotations

import signal
import subprocess
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.events import (
    CheckpointDone,
    Event,
    GenerationProposed,
    StateRestored,
    StepDone,
    StepProtected,
)
from holdfast.tools.chaos.faults import bits
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.soak.striking import SoakStriker
from holdfast.tools.chaos.soak.strokes import (
    ENDING,
    MOMENTS,
    NODES,
    SoakFault,
    SoakFaultKind,
    SoakSetup,
    Stroke,
    strokes,
)
from holdfast.tools.chaos.soak.watching import SoakEvents, Use, outcries

RANKS = sum(NODES.values())


PROPOSED = GenerationProposed(generation=1, ranks=("trainer",) * RANKS)


def protected(step: int) -> Event:
    return StepProtected(generation=1, step=step)


def durable_at(step: int) -> Event:
    return CheckpointDone(step=step, seconds=1.0, bytes=1, bytes_per_s=1)


def drawn(seed: int, *, kinds: tuple[SoakFaultKind, ...] = tuple(SoakFaultKind)) -> list[Stroke]:
    return list(islice(strokes(seed, pause_s=(1.0, 6.0), kinds=kinds), 300))


def test_a_seed_is_the_same_harm_again() -> None:
    assert drawn(7) == drawn(7) != drawn(8)
    assert SoakSetup.drawn(7) == SoakSetup.drawn(7)
    assert {SoakSetup.drawn(seed).parity for seed in range(2)} == {1, 2}


def test_every_kind_comes_alone_in_pairs_and_during_recoveries() -> None:
    found = drawn(0)
    assert {stroke.first.kind for stroke in found} == set(SoakFaultKind)
    during = [stroke for stroke in found if stroke.moment]
    assert {stroke.moment for stroke in during} == set(MOMENTS)
    assert {stroke.first.kind for stroke in during} == set(ENDING)
    pairs = [stroke for stroke in found if stroke.then and not stroke.moment]
    assert pairs and all(each.then and each.first.node != each.then.node for each in pairs)


def test_only_what_was_asked_for_is_done() -> None:
    kinds = (SoakFaultKind.FLIP_SLOT, SoakFaultKind.STOP_WORKER)
    for stroke in drawn(0, kinds=kinds):
        assert {each.kind for each in (stroke.first, stroke.then) if each} <= set(kinds)


def after(*harmed: str, parity: int, restored: int, durable: int = -1) -> list[str]:
    """Return the violations if a step is restored after nodes were harmed at protected step 90."""
    seen = SoakEvents(ranks=RANKS)
    events: list[Event] = [PROPOSED]
    events += [durable_at(durable)] if durable >= 0 else []
    seen.take([*events, StepDone(step=90), protected(90)])
    seen.expect(set(harmed), parity=parity)
    seen.take([StateRestored(generation=1, step=restored, tier="parity")])
    return seen.wrong


def test_what_was_protected_may_not_be_lost_to_as_many_faults_as_parity_makes_good() -> None:
    assert after("a", parity=1, restored=90) == []
    assert after("a", parity=1, restored=91) == []
    (wrong,) = after("a", parity=1, restored=89)
    assert "restored step 89" in wrong and "step 90 was protected" in wrong
    assert after("a", "b", parity=2, restored=89) != []


def test_more_faults_may_cost_all_but_the_newest_checkpoint() -> None:
    assert after("a", "b", parity=1, restored=0) == []
    assert after("a", "b", parity=1, restored=50, durable=50) == []
    assert after("a", "b", parity=1, restored=49, durable=50) != []


def test_harm_is_of_no_account_once_a_step_that_began_later_is_protected_by_all() -> None:
    seen = SoakEvents(ranks=RANKS)
    seen.take([PROPOSED, StepDone(step=10)])
    seen.expect({"a"}, parity=1)
    seen.take([protected(11)])
    seen.expect({"b"}, parity=1)
    assert seen.safe == -1, "step 11 was under way when a was harmed: b is the second"
    seen.take([protected(20)])
    seen.expect({"c"}, parity=1)
    seen.take([StateRestored(generation=1, step=19, tier="arena")])
    assert len(seen.wrong) == 1


def test_one_bit_of_what_a_node_holds_is_flipped_also_when_nobody_lives_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Mock(spec=LauncherProcess, run="run-1")
    monkeypatch.setattr(bits, "arena_path", lambda run, node: tmp_path / run / node)
    striker = SoakStriker(launcher, tmp_path, fills=False)
    slot, row = (
        SoakFault(kind=SoakFaultKind.FLIP_SLOT, node="a", pick=0.5),
        SoakFault(kind=SoakFaultKind.FLIP_PARITY, node="a", pick=0.5),
    )
    path = tmp_path / "run-1" / "a" / "000001.slot"
    assert not striker.strike(slot)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1000))
    assert striker.strike(slot) and not striker.strike(row)
    (byte,) = filter(None, path.read_bytes())
    assert byte.bit_count() == 1
    assert striker.count == {SoakFaultKind.FLIP_SLOT: 1}


def test_launcher_and_coordinator_are_killed_one_at_a_time(tmp_path: Path) -> None:
    launcher_kill, coordinator_kill = (
        SoakFault(kind=kind, node="a", pick=0.5, seconds=2.0)
        for kind in (SoakFaultKind.KILL_LAUNCHER, SoakFaultKind.KILL_COORDINATOR)
    )
    with (
        subprocess.Popen(["sleep", "60"]) as first,
        subprocess.Popen(["sleep", "60"]) as second,
    ):
        job = {"run": "run-1", "pid": first.pid, "coordinator_pid": second.pid}
        launcher = Mock(spec=LauncherProcess, **job)
        launcher.processes.return_value = {}
        striker = SoakStriker(launcher, tmp_path, fills=False)
        assert striker.strike(coordinator_kill)
        assert second.wait() == -signal.SIGKILL
        assert not striker.strike(launcher_kill), "the coordinator is not back yet"
        launcher.returns.assert_not_called()
        launcher.coordinator_pid = first.pid
        assert striker.strike(launcher_kill)
        assert first.wait() == -signal.SIGKILL
        launcher.returns.assert_called_once_with(after_s=2.0)


def test_errors_that_nobody_caught_are_found_in_the_logs(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_text("all\nfine\n")
    (tmp_path / "sidecar-a.log").write_text(
        'ERROR handler failed\nTraceback (most recent call last):\n  File "x.py"\nOSError: full\n'
    )
    assert outcries(tmp_path) == ["sidecar-a.log:2: OSError: full"]


def test_keys_and_files_that_a_job_leaves_behind_without_end_are_found(tmp_path: Path) -> None:
    key = RunKey.new()
    key.save(tmp_path / "key.json")
    server = EmbeddedServer(key)
    coordinator = connect(server.address, key)
    launcher = Mock(spec=LauncherProcess, pid=0, coordinator_pid=0, run_dir=tmp_path)
    launcher.coordinator_address = server.address
    launcher.processes.return_value = {}

    def soaked(*, leaves: int) -> Use:
        use = Use(others_bytes=0)
        for number in range(60):
            if number % leaves == 0:
                coordinator.put(f"run/{leaves}/{number}", "")
                (tmp_path / f"{leaves}-{number}").touch()
            use.sample(launcher, float(number))
        return use

    try:
        flat = soaked(leaves=30)
        assert flat.wrong() == []
        assert flat.table()[-1].startswith("keys at the coordinator: ")
        files, keys = soaked(leaves=1).wrong()
    finally:
        coordinator.close()
        server.close()
    assert files.startswith("files in the run directory grew from ")
    assert keys.startswith("keys at the coordinator grew from ")


def test_a_coordinator_that_is_away_leaves_only_its_keys_uncounted(tmp_path: Path) -> None:
    launcher = Mock(spec=LauncherProcess, pid=0, coordinator_pid=0, run_dir=tmp_path)
    launcher.processes.return_value = {}
    use = Use(others_bytes=0)
    use.sample(launcher, 0.0)
    assert use.table()[-1] == "files in the run directory: 0 → 0"
