"""The parts of a soak that need no job: drawn faults, promises, counts."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.events import (
    CheckpointDone,
    Event,
    GenerationProposed,
    StateRestored,
    StepDone,
    StepProtected,
    WorkerExited,
)
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.tools.chaos.faults import bits
from holdfast.tools.chaos.faults.preloaded import clock, disk, preload
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.chaos.soak.soak import SoakedJob, listed, sources
from holdfast.tools.chaos.soak.striking import SoakStriker
from holdfast.tools.chaos.soak.strokes import (
    ENDING,
    HARMLESS,
    MOMENTS,
    NODES,
    OF_CLOCKS,
    OF_DISKS,
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


def test_every_kind_of_clock_and_disk_is_a_scenarios_kind_and_costs_no_memory() -> None:
    for kind, of_scenario in (OF_CLOCKS | OF_DISKS).items():
        assert of_scenario in disk.KINDS | clock.KINDS
        assert CATALOGUE[of_scenario].lasts and not CATALOGUE[of_scenario].memory
        alone = [each for each in drawn(0, kinds=(kind,)) if each.first.kind is kind]
        assert alone and not set().union(*(each.harmed for each in alone))
        assert all(each.first.seconds >= 1 for each in alone)
        assert len({each.first.amount for each in alone}) > 1 or not CATALOGUE[of_scenario].amount
    assert {*OF_CLOCKS, *OF_DISKS} <= HARMLESS


def test_clocks_jump_forwards_and_backwards() -> None:
    kinds = (SoakFaultKind.JUMP_CLOCK, SoakFaultKind.JUMP_CLOCKS)
    for kind in kinds:
        amounts = [each.first.amount or 0.0 for each in drawn(0, kinds=(kind,))]
        assert min(amounts) < -3600 and max(amounts) > 3600


def test_a_fault_is_told_with_its_amount_its_seconds_and_its_node() -> None:
    def text_of(kind: SoakFaultKind, amount: float | None = None, seconds: float = 2.0) -> str:
        return str(SoakFault(kind=kind, node="b", pick=0.5, seconds=seconds, amount=amount))

    assert text_of(SoakFaultKind.JUMP_CLOCK, -3600.0) == "jump a clock by -3600 s for 2.0 s: b"
    assert text_of(SoakFaultKind.JUMP_CLOCKS, 60.0) == "jump all clocks by +60 s for 2.0 s"
    assert (
        text_of(SoakFaultKind.DRIFT_CLOCK, 0.1) == "drift a clock by +0.10 s a second for 2.0 s: b"
    )
    assert text_of(SoakFaultKind.SLOW_DISK, 0.05) == "slow a disk by 0.05 s a call for 2.0 s: b"
    assert text_of(SoakFaultKind.FAIL_DISK) == "fail a disk for 2.0 s: b"
    assert text_of(SoakFaultKind.KILL_NODE, seconds=0.0) == "kill all of a node: b"


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


def test_a_pause_is_measured_by_the_soaks_own_clock() -> None:
    times_s = iter((10.0, 10.5, 13.0, 13.5))
    seen = SoakEvents(ranks=RANKS, clock=lambda: next(times_s))
    seen.take([StepDone(step=1, time_s=1000.0), StepDone(step=2, time_s=4600.0)])
    assert seen.pauses == [], "a clock of the job jumped"
    seen.take([StepDone(step=3, time_s=1000.2)])
    assert seen.pauses == [(2.5, 3)]
    seen.begin()
    seen.take([StepDone(step=4, time_s=1000.3)])
    assert seen.pauses == [(2.5, 3)]


def test_counts_are_told_the_largest_first_and_briefly() -> None:
    assert listed({}) == "none"
    assert listed({"exit": 1, "join": 20}) == "20 × join, 1 × exit"
    (line,) = listed({"x" * 500: 3}).splitlines()
    assert line.startswith("3 × xxx") and line.endswith("x…") and len(line) < 80
    assert sources({"none": 1, "parity": 2}) == {"nothing: begun anew": 1, "parity": 2}


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


WRITER = """
import sys, time
from pathlib import Path
for line in sys.stdin:
    try:
        Path(sys.argv[1]).write_text(line)
        print(time.time(), flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
"""It writes a file for each line that it reads, and prints its wall clock, or an errno."""


@contextlib.contextmanager
def striker_of_a_writer(tmp_path: Path) -> Iterator[tuple[SoakStriker, Callable[[], float]]]:
    """Yield a striker of a job whose node "a" is one process, and a call that has it write."""
    job = {"run": "run-1", "pid": 0, "coordinator_pid": 0}
    launcher = Mock(spec=LauncherProcess, **job)
    striker = SoakStriker(launcher, tmp_path, fills=False)
    env = {**os.environ, **striker.prepare(tuple(SoakFaultKind))}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        launcher.processes.return_value = {"a": NodeProcesses(agent=process.pid, sidecar=0)}
        assert process.stdin and process.stdout
        requests, replies = process.stdin, process.stdout

        def write() -> float:
            print("line", file=requests, flush=True)
            return float(replies.readline())

        try:
            yield striker, write
        finally:
            striker.settle()
            process.kill()


def test_clocks_and_disks_of_a_node_go_wrong_until_the_fault_ends(tmp_path: Path) -> None:
    def fault(kind: SoakFaultKind, *, node: str = "a", amount: float | None = None) -> SoakFault:
        return SoakFault(kind=kind, node=node, pick=0.5, seconds=600.0, amount=amount)

    with striker_of_a_writer(tmp_path) as (striker, write):
        assert abs(write() - time.time()) < 600
        assert not striker.strike(fault(SoakFaultKind.FAIL_DISK, node="b")), "b has no process"
        assert striker.strike(fault(SoakFaultKind.JUMP_CLOCK, amount=-3600.0))
        assert striker.strike(fault(SoakFaultKind.JUMP_CLOCKS, node="b", amount=-3600.0))
        assert abs(write() + 7200 - time.time()) < 600
        assert striker.strike(fault(SoakFaultKind.FILL_DISK))
        assert write() == errno.ENOSPC
        striker.settle()
        assert abs(write() - time.time()) < 600
        assert striker.count == Counter(("jump a clock", "jump all clocks", "fill a disk"))


def test_without_a_compiler_clocks_and_disks_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preload.shutil, "which", lambda name: None)
    nodes = (NodeSpec(name="a", domain="a", slots={"trainer": 1}),)
    config = LaunchConfig(command=("true",), nodes=nodes, wanted={"trainer": 1})
    launcher = Mock(spec=LauncherProcess, config=config, run_dir=tmp_path / "run")
    part = SoakedJob(launcher, SoakEvents(ranks=1), Mock(spec=Use), folder=tmp_path, fills=False)
    part.start((SoakFaultKind.KILL_NODE, SoakFaultKind.JUMP_CLOCK, SoakFaultKind.FAIL_DISK))
    launcher.start.assert_called_once_with()
    assert not launcher.config.agent_env
    said = capsys.readouterr().out
    assert "the soak leaves out 'jump a clock', 'fail a disk': " in said
    assert "install gcc" in said and "kill all of a node" not in said
    launcher.processes.return_value = {"a": NodeProcesses(agent=os.getpid(), sidecar=0)}
    fault = SoakFault(kind=SoakFaultKind.FAIL_DISK, node="a", pick=0.5, seconds=1.0)
    assert not part.striker.strike(fault)


def test_errors_that_nobody_caught_are_found_in_the_logs(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_text("all\nfine\n")
    (tmp_path / "sidecar-a.log").write_text(
        'ERROR handler failed\nTraceback (most recent call last):\n  File "x.py"\nOSError: full\n'
    )
    assert outcries(tmp_path) == ["sidecar-a.log:2: OSError: full"]


def test_nothing_may_end_of_a_disk_that_fails_or_is_full(tmp_path: Path) -> None:
    said = "StoreError: /run/checkpoints/x: cannot write it: Input/output error; the disk fails"
    for name in ("trainer-0.log", "sidecar-a.log"):
        (tmp_path / name).write_text(f'Traceback (most recent call last):\n  File "x.py"\n{said}\n')
    assert outcries(tmp_path) == [f"sidecar-a.log:1: {said}", f"trainer-0.log:1: {said}"]
    seen = SoakEvents(ranks=RANKS)
    seen.take([WorkerExited(seat="trainer/0", pid=1, status=f"exit status 1: {said}")])
    (wrong,) = seen.wrong
    assert wrong == f"trainer/0 ended: exit status 1: {said}"


def test_a_step_that_was_lost_is_told_once_and_no_more_expected() -> None:
    seen = SoakEvents(ranks=RANKS)
    seen.take([PROPOSED, StepDone(step=90), protected(90), durable_at(80)])
    seen.expect({"a", "b"}, parity=1)
    seen.take([StateRestored(generation=2, step=50, tier="peer")])
    assert len(seen.wrong) == 1 and "step 80 was protected" in seen.wrong[0]
    seen.take([StepDone(step=70), protected(70), durable_at(70)])
    seen.expect({"a", "b"}, parity=1)
    seen.take([StateRestored(generation=3, step=70, tier="checkpoint")])
    assert len(seen.wrong) == 1, "the job never came to step 80 again"


def test_resources_grow_only_beyond_both_quarters_of_the_first_half() -> None:
    def wrong(*handles: int) -> list[str]:
        """Return the growth in a soak whose twelve parts have these numbers of open files."""
        used = Use(others_bytes=0)
        part = {"own": 0, "threads": 0}
        used._largest = [{"sidecar": {**part, "handles": n}} for n in handles for _ in range(10)]
        used._shared = [0] * len(used._largest)
        return used.wrong()

    assert wrong(*[120] * 3, *[30] * 3, *[120] * 6) == [], "the job was down for a quarter"
    assert wrong(*[30] * 6, *[120] * 6) == ["handles of the sidecar grew from 30 to 120"]


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
