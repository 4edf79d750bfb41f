"""The families of faults: their effects, refusals, and parts that need no process."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from chaos_victims import Site, struck
from tree import ROOT

from holdfast.ckpt.memory.arena import arena_path, hold
from holdfast.tools.chaos.faults.bits import BitsInjector, places
from holdfast.tools.chaos.faults.environment import before, together
from holdfast.tools.chaos.faults.etcd.coordinator import CoordinatorInjector
from holdfast.tools.chaos.faults.injector import Injector, MissedError
from holdfast.tools.chaos.faults.inside import InsideInjector
from holdfast.tools.chaos.faults.network.cut import NetworkInjector
from holdfast.tools.chaos.faults.network.sockets import End, pairs, program
from holdfast.tools.chaos.faults.network.wire import WireInjector
from holdfast.tools.chaos.faults.preloaded.disk import DiskInjector
from holdfast.tools.chaos.faults.registry import families, for_kinds
from holdfast.tools.chaos.faults.store import ENDPOINT, StoreInjector
from holdfast.tools.chaos.library import load
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.chaos.scenarios.scenario import COORDINATOR_ENV, ScenarioError, parse
from holdfast.tools.chaos.scenarios.strikes import draw

DOCS = (ROOT / "docs/how-to/chaos.md").read_text()
SCENARIOS = sorted((ROOT / "tools/chaos/scenarios/ready").glob("*.toml"))


def test_every_kind_is_of_one_family_and_in_the_catalogue() -> None:
    kinds = list(itertools.chain.from_iterable(family.kinds for family in families()))
    assert len(kinds) == len(set(kinds))
    assert set(kinds) <= set(CATALOGUE)


def test_kinds_of_one_family_share_an_injector() -> None:
    found = for_kinds(["disk-full", "disk-slow", "clock-jump"])
    assert found["disk-full"] is found["disk-slow"] is not found["clock-jump"]
    with pytest.raises(KeyError, match="no such"):
        for_kinds(["no such"])


def test_the_docs_name_every_kind_with_its_amount() -> None:
    table = DOCS.partition("| kind |")[2].partition("\n\n")[0]
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    for family in families():
        for kind in family.kinds:
            assert f"| {CATALOGUE[kind].amount or '–'} |" in rows[kind]
            assert f"| {', '.join(CATALOGUE[kind].parts)} |" in rows[kind]


def test_the_scenario_in_the_docs_can_be_read() -> None:
    for text in re.findall(r"```toml\n(.*?)```", DOCS, flags=re.DOTALL):
        assert parse(tomllib.loads(text), source="docs").fault


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_ready_scenarios_can_be_read_and_drawn(path: Path) -> None:
    scenario = load(path)
    assert scenario.name == path.stem
    assert draw(scenario)
    assert {strike.kind for strike in draw(scenario)} == {fault.kind for fault in scenario.fault}


@pytest.mark.parametrize(
    ("make", "kind", "fields", "says"),
    [
        (InsideInjector, "exit", {"amount": 256}, "an exit status is from 0 to 255"),
        (BitsInjector, "flip-slot", {"amount": 0}, "give 1 or more"),
        (DiskInjector, "disk-torn", {"amount": 1}, "0 or more, less than 1"),
        (NetworkInjector, "network-loss", {"amount": 1.5}, "more than 0, 1 at most"),
        (WireInjector, "flip-wire", {"amount": 0}, "give 1 or more"),
        (StoreInjector, "store-throttle", {"amount": 0.5}, "give 1 or more"),
        (StoreInjector, "store-error", {}, "AWS_ENDPOINT_URL_S3"),
        (CoordinatorInjector, "coordinator-restart", {}, "how long it is down"),
        (CoordinatorInjector, "leader-kill", {}, "install one"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: type[Injector],
    kind: str,
    fields: dict[str, float],
    says: str,
) -> None:
    for name in (ENDPOINT, "AWS_ENDPOINT_URL", COORDINATOR_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ScenarioError, match=says):
        make().prepare(Site(tmp_path, run="r"), (struck(kind, **fields),))


def test_a_coordinator_elsewhere_and_a_job_without_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COORDINATOR_ENV, "etcd://127.0.0.1:1")
    strikes = (struck("lease-lost"),)
    with pytest.raises(ScenarioError, match="no etcd of this machine listens there"):
        CoordinatorInjector().prepare(Site(tmp_path, run="r"), strikes)
    with pytest.raises(ScenarioError, match=r"workload\.nodes"):
        CoordinatorInjector().prepare(Site(tmp_path), strikes)


def test_a_store_with_tls_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "https://example.com")
    with pytest.raises(ScenarioError, match="plain HTTP only"):
        StoreInjector().prepare(Site(tmp_path), (struck("store-error"),))


def test_the_library_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ScenarioError, match="install gcc"):
        DiskInjector().prepare(Site(tmp_path), (struck("disk-full"),))


def test_environments_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "own")
    assert before("PYTHONPATH", "shim") == "shim:own"
    joined = together(
        {"PYTHONPATH": "shim:own", "X": "1"},
        {"LD_PRELOAD": "a b", "X": "2"},
        {"PYTHONPATH": "own:more", "LD_PRELOAD": "a"},
    )
    assert joined == {"PYTHONPATH": "shim:own:more", "LD_PRELOAD": "a b", "X": "2"}


def test_bits_are_different_and_follow_from_the_pick() -> None:
    found = places(4, 16, 0.3)
    assert found == places(4, 16, 0.3) != places(4, 16, 0.4)
    assert len(set(found)) == 16
    assert all(0 <= byte < 4 and 0 <= bit < 8 for byte, bit in found)
    assert len(places(1, 100, 0.3)) == 8


@pytest.mark.parametrize(
    ("kind", "hit"),
    [
        ("flip-pack", "ck/step-2/data/0.pack"),
        ("flip-manifest", "ck/step-2/manifest.json"),
        ("flip-spill", "spill/a/1-0.slot"),
    ],
)
def test_bits_flip_in_one_file(tmp_path: Path, kind: str, hit: str) -> None:
    names = [
        *("ck/step-1/manifest.json", "ck/step-1/data/0.pack"),
        *("ck/step-2/data/0.pack", "ck/step-2/manifest.json"),
        *("calm/spill/a/1-0.slot", "spill/a/1-0.slot", "spill/b/1-1.slot"),
    ]
    for order, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, ns=(order, order))
    site = Site(tmp_path)
    victim = site.add("node a", part="node", node="a")
    BitsInjector().strike(struck(kind, amount=3), victim, site)
    changed = {
        name: int.from_bytes((tmp_path / name).read_bytes(), "big").bit_count() for name in names
    }
    assert changed == {name: 3 if name == hit else 0 for name in names}


@pytest.mark.parametrize(("kind", "name"), [("flip-slot", "0.slot"), ("flip-parity", "0.row")])
def test_bits_flip_in_a_nodes_memory(tmp_path: Path, kind: str, name: str) -> None:
    run = f"test-{os.getpid():x}-{kind}"
    site = Site(tmp_path, run=run)
    victim = site.add("node a", part="node", node="a")
    with pytest.raises(MissedError, match="no file"):
        BitsInjector().strike(struck(kind), victim, site)
    folder = arena_path(run, "a")
    fd = hold(folder)  # a job beside this test sweeps what nobody holds
    try:
        (folder / name).write_bytes(bytes(100))
        BitsInjector().strike(struck(kind), victim, site)
        assert int.from_bytes((folder / name).read_bytes(), "big").bit_count() == 1
    finally:
        shutil.rmtree(folder)
        os.close(fd)


def test_a_filter_drops_all_or_a_share() -> None:
    assert len(program(1.0)) == 8
    assert len(program(0.5)) == 32
    assert program(0.5)[12:16] == (0x7FFFFFFF).to_bytes(4, "little")


def test_connections_that_leave_are_found_with_their_other_ends() -> None:
    def end(port: int, to: int, *, listens: bool = False) -> End:
        return End(pid=port, fd=3, inode=port, local=("h", port), remote=("h", to), listens=listens)

    inside = [end(1, 2), end(2, 1), end(3, 9), end(4, 8), end(5, 0, listens=True)]
    outside = [end(9, 3), end(7, 6)]
    assert pairs(inside, outside) == [(end(3, 9), end(9, 3)), (end(4, 8), None)]
