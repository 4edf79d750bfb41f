"""Facts become findings: each verdict has a fact that leads to it, and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tools.doctor import machine, surroundings
from holdfast.tools.doctor.facts import (
    UNLIMITED,
    AddressFacts,
    DiskFacts,
    JobNode,
    MachineFacts,
    PathFacts,
    PlanFacts,
    ProcessLimit,
)
from holdfast.tools.doctor.findings import Finding, Verdict
from holdfast.tools.doctor.job import judge_job
from holdfast.tools.doctor.machine import judge_machine

GIB = 1 << 30
FREE = ProcessLimit(soft=UNLIMITED, hard=UNLIMITED)
GOOD = MachineFacts(
    kernel="6.1.0-13-amd64",
    cores=16,
    memory_bytes=64 * GIB,
    free_bytes=60 * GIB,
    shared_place="/dev/shm",
    shared_bytes=32 * GIB,
    shared_free_bytes=30 * GIB,
    files=ProcessLimit(soft=1024, hard=1 << 20),
    processes=FREE,
    locked=FREE,
    huge="advise",
    isal="2.31.0",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    clock="tsc",
    clock_ns=40.0,
)
PLAN = PlanFacts(rank_bytes=2 * GIB, ranks_per_node=4, need_bytes=10 * GIB, lent_bytes=4 * GIB)


def good(**changes: object) -> MachineFacts:
    return msgspec.structs.replace(GOOD, **changes)


def plan(**changes: object) -> PlanFacts:
    return msgspec.structs.replace(PLAN, **changes)


def test_nothing_is_wrong_with_a_good_machine() -> None:
    findings = judge_machine(GOOD, PLAN)
    assert [each for each in findings if each.verdict is not Verdict.OK] == []
    assert len({each.check for each in findings}) == len(findings) == 15


@pytest.mark.parametrize(
    ("check", "facts", "planned", "verdict"),
    [
        ("shared memory", good(shared_bytes=0, shared_free_bytes=0), PLAN, "failure"),
        (
            "shared memory",
            good(shared_bytes=64 << 20, shared_free_bytes=64 << 20),
            PlanFacts(),
            "failure",
        ),
        ("shared memory", good(shared_free_bytes=GIB // 2), PlanFacts(), "warning"),
        ("shared memory", good(shared_free_bytes=9 * GIB), PLAN, "failure"),
        ("shared memory", good(shared_free_bytes=11 * GIB), PLAN, "warning"),
        ("shared memory", good(shared_free_bytes=11 * GIB), plan(nodes=2), "failure"),
        ("parity and budget", GOOD, plan(refusal="give more nodes"), "failure"),
        ("parity and budget", GOOD, plan(budget_bytes=9 * GIB), "failure"),
        ("parity and budget", GOOD, plan(budget_bytes=12 * GIB), "warning"),
        ("parity and budget", GOOD, plan(budget_bytes=14 * GIB), "ok"),
        ("memory limit", good(control_bytes=12 * GIB, control_used_bytes=3 * GIB), PLAN, "failure"),
        ("memory limit", good(control_bytes=12 * GIB), PLAN, "warning"),
        ("memory limit", good(control_bytes=20 * GIB), PLAN, "ok"),
        ("memory limit", good(free_bytes=9 * GIB), PLAN, "failure"),
        ("cores", good(cores=3), PLAN, "warning"),
        ("cores", good(control_cores=2.5), PLAN, "warning"),
        ("open files", good(files=ProcessLimit(soft=64, hard=64)), PLAN, "failure"),
        ("open files", good(files=ProcessLimit(soft=512, hard=512)), PLAN, "warning"),
        ("processes", good(processes=ProcessLimit(soft=100, hard=100, used=90)), PLAN, "failure"),
        ("processes", good(processes=ProcessLimit(soft=400, hard=400, used=90)), PLAN, "warning"),
        (
            "processes",
            good(processes=ProcessLimit(soft=9, hard=9, used=9), privileged=True),
            PLAN,
            "ok",
        ),
        ("processes", good(control_processes=64, privileged=True), PLAN, "failure"),
        ("locked memory", good(locked=ProcessLimit(soft=65536, hard=65536)), PLAN, "ok"),
        (
            "locked memory",
            good(locked=ProcessLimit(soft=65536, hard=65536), rdma=True),
            PLAN,
            "warning",
        ),
        ("huge pages", good(huge="never"), PLAN, "warning"),
        ("huge pages", good(huge=""), PLAN, "ok"),
        ("swap", good(swap_bytes=GIB, swap_used_bytes=GIB // 2), PLAN, "warning"),
        ("swap", good(swap_bytes=GIB, swap_used_bytes=1 << 20), PLAN, "ok"),
        ("kernel", good(kernel="4.18.0-553.el8"), PLAN, "failure"),
        ("kernel", good(kernel="5.4.0-150-generic"), PLAN, "warning"),
        ("clock", good(clock="hpet"), PLAN, "warning"),
        ("clock", good(clock_ns=2500.0), PLAN, "warning"),
        ("torch", good(versions={"python": "3.11.7"}), PLAN, "failure"),
        ("torch", good(objection="torch 1.0 was never tested"), PLAN, "failure"),
        ("ISA-L", good(isal="", isal_error="no library"), PLAN, "failure"),
        ("compiled copy", good(copy=False, compiler="gcc"), PLAN, "warning"),
        ("compiled copy", good(copy=False), PLAN, "warning"),
        ("sandbox", good(unprotected={"files": "no mounts"}), PLAN, "warning"),
    ],
)
def test_a_fact_has_a_verdict(
    check: str, facts: MachineFacts, planned: PlanFacts, verdict: str
) -> None:
    (finding,) = [each for each in judge_machine(facts, planned) if each.check == check]
    assert finding.verdict == verdict
    assert_helpful(finding)


def assert_helpful(finding: Finding) -> None:
    """A finding that is not fine says why and what helps."""
    assert finding.found
    assert (finding.verdict is Verdict.OK) == (not finding.why) == (not finding.remedy)


DISK = DiskFacts(
    purpose="checkpoint",
    place="/data",
    free_bytes=100 * GIB,
    written_bytes=GIB,
    seconds=1.0,
    size_bytes=20 * GIB,
)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"every_s": 60.0}, "ok"),
        ({"every_s": 30.0}, "warning"),
        ({"every_s": 10.0}, "failure"),
        ({"free_bytes": 30 * GIB}, "warning"),
        ({"free_bytes": 10 * GIB}, "failure"),
        ({"size_bytes": 0, "free_bytes": 0}, "ok"),
        ({"error": "No space left on device"}, "failure"),
    ],
)
def test_a_disk_is_judged_by_room_and_speed(changes: dict[str, object], verdict: str) -> None:
    finding = surroundings.disk(msgspec.structs.replace(DISK, **changes))
    assert finding.verdict == verdict
    assert_helpful(finding)


KEY = PathFacts(purpose="key file", path="/home/a b/key.json", mode=0o600, owner=7, user=7)
FOLDER = PathFacts(purpose="run directory", path="r", directory=True, mode=0o755, owner=7, user=7)


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (KEY, ""),
        (msgspec.structs.replace(KEY, there=False), ""),
        (msgspec.structs.replace(KEY, mode=0o604), "chmod o-rwx '/home/a b/key.json'"),
        (msgspec.structs.replace(KEY, owner=8), "run as that user"),
        (msgspec.structs.replace(KEY, error="cannot be read"), "change its permissions"),
        (FOLDER, ""),
        (msgspec.structs.replace(FOLDER, mode=0o775), "chmod 700 r"),
    ],
)
def test_a_key_and_a_run_directory_are_private(facts: PathFacts, remedy: str) -> None:
    finding = surroundings.private(facts)
    assert finding.verdict == ("failure" if remedy else "ok")
    assert remedy in finding.remedy
    assert_helpful(finding)


@pytest.mark.parametrize("purpose", ["loopback", "host", "port", "reach"])
def test_an_address_that_fails_is_told_with_a_remedy(purpose: str) -> None:
    fine = AddressFacts(purpose=purpose, address="10.0.0.7:9", seconds=0.001)
    bad = msgspec.structs.replace(fine, error="connection refused")
    assert surroundings.address(fine).verdict == "ok"
    assert surroundings.address(bad).verdict == "failure"
    assert_helpful(surroundings.address(bad))


NODE = JobNode(
    node="n0",
    versions={"torch": "2.13.0"},
    skew_s=0.01,
    unsure_s=0.1,
    mode="full",
    need_bytes=4 * GIB,
    held_bytes=3 * GIB,
    shared_free_bytes=8 * GIB,
)


def node(**changes: object) -> JobNode:
    return msgspec.structs.replace(NODE, **changes)


@pytest.mark.parametrize(
    ("nodes", "check", "verdict", "found"),
    [
        ([NODE, node(node="n1")], "nodes", "ok", "2 of 2 answer"),
        ([NODE, node(node="n1", error="no answer")], "nodes", "failure", "n1 does not answer"),
        ([node(troubles=("step 4 is not protected",))], "nodes", "warning", "n0: step 4"),
        ([NODE, node(node="n1")], "versions", "ok", "torch 2.13.0"),
        (
            [NODE, node(node="n1", versions={"torch": "2.14.0"})],
            "versions",
            "failure",
            "n0: torch 2.13.0; n1: torch 2.14.0",
        ),
        ([NODE], "clocks", "ok", "within 0.010 s"),
        ([node(skew_s=None)], "clocks", "ok", "not told"),
        ([NODE, node(node="n1", skew_s=-7.5)], "clocks", "warning", "n1 is -7.5 s off"),
        ([NODE, node(node="n1", skew_s=1.05)], "clocks", "ok", "within 1.050 s"),
        ([NODE], "snapshot memory", "ok", "up to 4.0 GiB"),
        ([node(shared_free_bytes=0)], "snapshot memory", "failure", "may use 3.0 GiB"),
        ([node(budget_bytes=GIB)], "snapshot memory", "failure", "may use 1.0 GiB"),
        ([node(mode="small")], "snapshot memory", "warning", "mode small"),
    ],
)
def test_nodes_are_judged_side_by_side(
    nodes: list[JobNode], check: str, verdict: str, found: str
) -> None:
    findings = [each for each in judge_job(nodes) if each.check == check]
    (finding,) = [each for each in findings if each.verdict == verdict]
    assert found in finding.found
    assert_helpful(finding)


SIZES = st.integers(0, 1 << 50)
LIMITS = st.integers(-1, 1 << 30)


@given(
    facts=st.builds(
        MachineFacts,
        kernel=st.sampled_from(["6.1", "5.10.0", "3.10", "weird"]),
        cores=st.integers(1, 512),
        memory_bytes=SIZES,
        free_bytes=SIZES,
        shared_place=st.just("/dev/shm"),
        shared_bytes=SIZES,
        shared_free_bytes=SIZES,
        files=st.builds(ProcessLimit, soft=LIMITS, hard=LIMITS, used=SIZES),
        processes=st.builds(ProcessLimit, soft=LIMITS, hard=LIMITS, used=st.integers(0, 1 << 20)),
        locked=st.builds(ProcessLimit, soft=LIMITS, hard=LIMITS),
        control_bytes=st.integers(-1, 1 << 50),
        control_used_bytes=SIZES,
        control_cores=st.floats(-1, 512),
        control_processes=LIMITS,
    ),
    planned=st.builds(
        PlanFacts,
        rank_bytes=SIZES,
        nodes=st.integers(1, 8),
        ranks_per_node=st.integers(1, 64),
        need_bytes=SIZES,
        lent_bytes=SIZES,
        budget_bytes=SIZES,
    ),
)
def test_any_facts_are_judged_and_every_complaint_helps(
    facts: MachineFacts, planned: PlanFacts
) -> None:
    for finding in judge_machine(facts, planned):
        assert_helpful(finding)


@given(SIZES, SIZES)
def test_more_room_is_never_worse(free: int, more: int) -> None:
    order = list(Verdict)

    def rank(judge: Callable[[MachineFacts, PlanFacts], Finding], facts: MachineFacts) -> int:
        return order.index(judge(facts, PLAN).verdict)

    less_room, more_room = (good(shared_free_bytes=each) for each in (free, free + more))
    assert rank(machine.shared_memory, more_room) <= rank(machine.shared_memory, less_room)
    low, high = (good(free_bytes=each) for each in (free, free + more))
    assert rank(machine.control_group, high) <= rank(machine.control_group, low)
