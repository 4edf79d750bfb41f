"""`holdfast bench`: every section runs and names its references; nothing is left behind.

No test here depends on how fast anything is.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from object_places import ObjectPlace
from rich.console import Console

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.store.places import open_store
from holdfast.tools.bench import command, start, tables
from holdfast.tools.bench.data_path import lost_time, storage
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Timings, Yardstick, in_turn
from holdfast.tools.bench.sections import SECTIONS
from holdfast.tools.cli import EXIT_FAILED, EXIT_USAGE, main

PEERLESS = {
    "copy, checksum",
    "first copy, new memory",
    "one node of three gone: its block from parity",
    "decode a column of 2 + 1, per byte read",
    "decode a column of 4 + 2, per byte read",
    "verify --deep",
    "4 → 2 writers",
    "4 → 3 writers",
}
COMMAND = (sys.executable, "-m", "holdfast.tools.cli", "bench")
ONCE = {"first copy, new memory"}
APART = {
    *("plan", "lost", "memory", "mttr", "resize", "goodput", "join", "start", "control", "exact"),
    *("rl", "environments", "vllm", "store", "tuning", "islands", "learning", "lines", "surface"),
    *("watches", "neighbors", "returns", "ledger", "meeting"),
}
"""Sections that are not measured together with the others: long, or with tables of their own."""


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All sections but those apart, tiny, in a process of their own."""
    place, target = tmp_path_factory.mktemp("bench"), tmp_path_factory.mktemp("out") / "f.json"
    before = left_in_memory()
    sections = [name for name in SECTIONS if name not in APART]
    done = subprocess.run(
        [
            *(*COMMAND, *sections, "--megabytes", "1", "--repeat", "2"),
            *("--dir", str(place), "--json", str(target)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "same layout" in done.stdout
    assert list(place.iterdir()) == []
    assert left_in_memory() <= before
    result: dict[str, Any] = json.loads(target.read_text())
    return result


def timed(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [figure for figure in found["figures"] if figure["versus"]]


def left_in_memory() -> set[str]:
    return {path.name for path in ARENA_ROOT.glob("holdfast-bench-*")}


def test_every_section_is_measured(found: dict[str, Any]) -> None:
    sections = dict.fromkeys(figure["section"] for figure in found["figures"])
    assert {*sections, *APART} == {*SECTIONS}
    assert (found["megabytes"], found["repeat"]) == (1, 2)
    assert found["left"] == []
    assert found["sections"].keys() == sections.keys()
    assert found["machine"]["cores"] >= 1
    assert {"holdfast", "torch", "python"} <= found["versions"].keys()


def test_a_run_that_is_stopped_keeps_the_sections_that_ended(tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "figures.json"
    place.mkdir()
    words = ("verify", "plan", "--megabytes", "1", "--repeat", "1", "--json", target)
    run = subprocess.Popen(
        [*COMMAND, *words, "--dir", place],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert any("verify --deep" in line for line in run.stdout)  # the file was first
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 130, stderr
    assert "Traceback" not in stderr
    found = json.loads(target.read_text())
    assert {figure["section"] for figure in found["figures"]} == {"verify"}
    assert found["left"] == ["plan"]
    assert list(place.iterdir()) == []


def test_a_large_state_has_the_fixed_costs_of_a_small_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "FIXED_BYTES", 1 << 20)
    laps: list[None] = []
    setup = BenchSetup(
        size_bytes=2 << 20, repeat=1, directory=tmp_path, lap=lambda: laps.append(None)
    )
    rows = {row.name: row.size_bytes for row in storage.reshard(setup)}
    assert len(laps) == 2
    assert rows.keys() == {
        f"{small}4 → {writers} writers" for small in ("", "1 MiB: ") for writers in (2, 3)
    }
    assert rows["1 MiB: 4 → 2 writers"] < rows["4 → 2 writers"]
    assert list(tmp_path.iterdir()) == []


def figures_of(
    section: str, directory: Path, *, megabytes: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Measure a section by itself, tiny and once, and see that nothing is left of it."""
    before = left_in_memory()
    words = (section, "--quick", "--megabytes", str(megabytes), "--repeat", "1", "--json", "-")
    done = subprocess.run(
        [*COMMAND, *words, "--dir", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    assert left_in_memory() <= before
    figures: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    return figures


@pytest.mark.exhaustive
def test_islands_are_timed_beside_ddp_and_send_far_less(tmp_path: Path) -> None:
    found = figures_of("islands", tmp_path, megabytes=1, timeout_s=600)
    values = {figure["name"]: figure["value"] for figure in found}
    assert values["no limit, DDP: sent"] == 4.0
    assert values["no limit, islands: fewer"] > 100


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_killed_island_comes_back_beside_a_plain_run(tmp_path: Path) -> None:
    from holdfast.tools.bench.faults import pauses
    from holdfast.tools.bench.islands.returns import ISLAND, KILLED, LOST, RUN

    found = figures_of("returns", tmp_path, megabytes=13, timeout_s=600)
    figures = {figure["name"]: figure for figure in found}
    for fault in (KILLED, LOST):
        plain = f"{RUN}, {fault}: {pauses.PAUSE}"
        assert figures[f"{ISLAND}, {fault}: {pauses.PAUSE}"]["versus"] == plain
        for job in (RUN, ISLAND):
            pause = figures[f"{job}, {fault}: {pauses.PAUSE}"]["value"]
            assert 0 < pause < figures[f"{job}, {fault}: {pauses.USEFUL}"]["value"]


@pytest.mark.exhaustive
def test_what_islands_learn_stands_beside_ddp_and_one_alone(tmp_path: Path) -> None:
    found = figures_of("learning", tmp_path, megabytes=1, timeout_s=900)
    values = {figure["name"]: figure["value"] for figure in found}
    assert values["4 islands: the end"] < values["one island alone: step 2"]
    assert values["4 islands: sent"] < values["DDP of 4: sent"]


def test_a_block_that_is_lost_is_set_in_all_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.tools.bench import neighbors

    assert main(["bench", "neighbors", "--quick", "--dir", str(tmp_path), "--json", "-"]) == 0
    losses = {
        each["name"]: each["value"] for each in json.loads(capsys.readouterr().out)["figures"]
    }
    assert losses.keys() == {f"{way}: {look}" for way in neighbors.WAYS for look in (0, 2, 4)}
    assert losses["fresh initialisation: 0"] != losses[f"{neighbors.NOTHING_LOST}: 0"]
    assert all(0 < loss < 10 for loss in losses.values())


@pytest.mark.exhaustive
def test_training_is_timed_with_and_without_saving(tmp_path: Path) -> None:
    names = {figure["name"] for figure in figures_of("lost", tmp_path, megabytes=1, timeout_s=200)}
    assert {f"{way}, 2 workers" for way in lost_time.WAYS} <= names
    assert any(name.endswith("longer by") for name in names)


def test_every_figure_has_its_samples_and_stands_beside_something(found: dict[str, Any]) -> None:
    for figure in timed(found):
        samples = figure["samples"]
        assert len(samples) == (1 if figure["name"] in ONCE else 2), figure
        assert all(each > 0 for each in samples), figure
        assert min(samples) <= figure["value"] <= max(samples), figure
        assert figure["versus_value"] > 0, figure
        assert math.isclose(figure["ratio"], figure["value"] / figure["versus_value"])
        assert figure["unit"] == "s"


def test_the_things_that_others_do_too_are_compared_with_them(found: dict[str, Any]) -> None:
    beside: dict[str, set[str]] = {}
    for figure in timed(found):
        beside.setdefault(figure["name"], set()).add(figure["versus"])
    for name, others in beside.items():
        assert (len(others) == 1) == (name in PEERLESS), (name, others)


def test_what_a_restore_costs_besides_time_is_told(found: dict[str, Any]) -> None:
    extra = {f["name"]: f["value"] for f in found["figures"] if f["section"] == "restore"}
    assert extra["same layout: bytes read / bytes wanted"] == pytest.approx(1, abs=0.01)
    assert extra["resharded 4 → 3: bytes read / bytes wanted"] >= 1
    assert extra["resharded 4 → 3: peak extra memory"] > 0


def test_the_state_has_about_the_size_asked_for(found: dict[str, Any]) -> None:
    for figure in timed(found):
        whole = figure["bytes"] * (3 if "one node of three" in figure["name"] else 1)
        assert 0.9 < whole / (1 << 20) < 1.1, figure


def test_the_plan_of_small_worlds_in_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.tools.bench import plan

    small = plan.StagedJob(stages=2, dp=4, tp=2)
    monkeypatch.setattr(plan, "QUICK_JOBS", (small,))
    words = ["bench", "plan", "--quick", "--repeat", "1", "--dir", str(tmp_path), "--json", "-"]
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {figure["section"] for figure in figures} == {"plan"}
    assert any(figure["name"] == "16 writers: open and plan one rank" for figure in figures)


@pytest.mark.exhaustive
def test_starts_are_timed_with_shared_imports_and_without(tmp_path: Path) -> None:
    figures = figures_of("start", tmp_path, megabytes=1, timeout_s=250)
    beside = {(each["name"], each["versus"]) for each in figures}
    assert {(start.FORKED, start.STARTED), (start.SHARED, start.APART)} <= beside


@pytest.mark.exhaustive
def test_memory_is_shown_by_purpose_beside_full_copies(tmp_path: Path) -> None:
    before, target = left_in_memory(), tmp_path / "figures.json"
    words = ("memory", "--quick", "--megabytes", "16", "--repeat", "1", "--json", target)
    done = subprocess.run(
        [*COMMAND, *words, "--dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert left_in_memory() <= before
    figures = {each["name"]: each for each in json.loads(target.read_text())["figures"]}
    for guard in ("parity 1 of 3", "a whole copy"):
        memory = {
            name.rpartition(": ")[2]: each["value"]
            for name, each in figures.items()
            if name.startswith(f"16 MiB a node, {guard}")
        }
        assert memory["slots"] > 16
        assert memory["sidecar, PSS beyond"] > 0
        assert memory["beyond slots and parity"] > 0
        assert f"16 MiB a node, {guard}" in done.stdout
    parity = [figures[f"16 MiB a node, {guard}: parity"]["value"] for guard in ("parity 1 of 3",)]
    copies = figures["16 MiB a node, a whole copy: parity"]["value"]
    assert 0 < parity[0] < copies
    assert figures["16 MiB a node, parity 1 of 3: all of it"]["ratio"] < 1


def test_only_the_sections_asked_for_run_and_parity_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from holdfast.tools.cli import main\n"
        "assert main(['bench', 'parity', '--megabytes', '1', '--repeat', '1']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(command.__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    assert "encode 2 + 1" in done.stdout
    assert "CRC32C" in done.stdout
    assert "ckpt.save" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("full", "section", "message"),
    [("disk", "persist", "--dir"), ("/dev/shm", "snapshot", "shared memory")],
)
def test_a_place_without_room_is_refused_before_anything_is_written(
    full: str,
    section: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = shutil.disk_usage

    def usage(path: Path) -> object:
        is_full = (full == "disk") == (Path(path) == tmp_path)
        return Usage(1, 1, 0) if is_full else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    words = ["bench", section, "--megabytes", "1", "--dir", str(tmp_path)]
    assert main(words) == EXIT_FAILED
    error = capsys.readouterr().err
    assert message in error
    assert "0 MiB" in error
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_free_memory", lambda: 0)
    assert main(["bench", "parity", "--dir", str(tmp_path)]) == EXIT_FAILED
    assert "of memory and" in capsys.readouterr().err


def test_a_section_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nosuch"]) == EXIT_USAGE
    assert "persist" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--repeat", "0"], ["--megabytes", "x"]])
def test_a_wrong_command_line_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == EXIT_USAGE


def test_cases_run_in_turn_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    order: list[str] = []

    def case(name: str) -> Mapping[str, float]:
        order.append(name)
        return {name: float(len(order))}

    setup = BenchSetup(size_bytes=1, repeat=2, directory=tmp_path, lap=lambda: order.append("|"))
    samples = in_turn([lambda: case("a"), lambda: case("b")], setup)
    assert "".join(order) == "ab|ab|ab|"
    row = samples.row("s", "a", 1, "b", "nobody")
    assert row.samples_s == (4.0, 7.0)
    assert [other.name for other in row.beside] == ["b"]


def test_nothing_timed_is_an_error() -> None:
    with pytest.raises(KeyError):
        Timings().row("s", "a", 1, "b")
    with pytest.raises(ValueError, match="never timed"):
        BenchRow(
            section="s",
            name="a",
            size_bytes=1,
            samples_s=(),
            beside=(Yardstick(name="b", seconds=1.0),),
        )


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_what_was_compared_with_what(width: int) -> None:
    row = BenchRow(
        section="persist",
        name="ckpt.save",
        size_bytes=10**9,
        samples_s=(1.0, 2.0, 3.0),
        beside=(
            Yardstick(name="file write + fsync", seconds=1.0),
            Yardstick(name="DCP save", seconds=0.8),
        ),
        extra=(("peak", 12.5, "MiB"),),
    )
    console = Console(file=io.StringIO(), width=width)
    tables.show([row], console=console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for phrase in (
        "persist",
        "ckpt.save",
        "2.00 s",
        "0.50",
        "DCP",
        "1.00 s",
        "800.0 ms",
        "2.50",
        "12.5",
    ):
        assert phrase in text


Faulted = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def faulted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Faulted:
    """Measures a section that hurts jobs, of two workers, with one fault each: figures by name."""
    from holdfast.tools.bench.faults import elastic_job, goodput, joining, mttr, peers, resize

    for module in (elastic_job, goodput, joining, mttr, peers, resize):
        monkeypatch.setattr(module, "WORKERS", 2)

    def measure(section: str, *words: str) -> dict[str, dict[str, Any]]:
        options = ["--quick", "--megabytes", "13", "--repeat", "1", *words]
        assert main(["bench", section, *options, "--dir", str(tmp_path), "--json", "-"]) == 0
        assert list(tmp_path.iterdir()) == []
        return {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}

    return measure


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_recoveries_are_timed_by_phase_and_beside_torchrun(
    faulted: Faulted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.tools.bench.faults import mttr, pauses, peers

    # what a notice costs is in `resize`, and torchft need not be there
    monkeypatch.setattr(mttr, "_noticed", lambda *_: [])
    monkeypatch.setattr(peers, "has_torchft", lambda: False)
    figures = faulted("mttr")
    for name in (mttr.KILL, mttr.JOIN, mttr.SPARE, mttr.TORCHRUN):
        pause = figures[f"{name}: {pauses.PAUSE}"]
        assert 0 < pause["value"] < 60
        assert len(pause["samples"]) == 1
        assert figures[f"{name}: {pauses.USEFUL}"]["value"] > pause["value"]
        assert figures[f"{name}: restore"]["value"] > 0
    assert figures[f"{mttr.KILL}: detect"]["value"] > 0
    hang = next(name for name in figures if name.endswith(pauses.BEYOND))
    assert figures[hang]["value"] > 0
    assert figures[f"{mttr.TORCHRUN}: {pauses.PAUSE}"]["versus"].startswith(mttr.KILL)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_leaves_and_comes_back_costs_no_step(faulted: Faulted) -> None:
    from holdfast.tools.bench.faults import pauses

    figures = faulted("resize")
    for way in ("2 → 1", "1 → 2"):
        assert figures[f"{way}: {pauses.PAUSE}"]["value"] > 0
    assert figures[f"2 → 1: {pauses.LOST}"]["value"] == 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_joins_are_timed_prepared_and_not(faulted: Faulted) -> None:
    from holdfast.tools.bench.faults import joining, pauses

    figures = faulted("join")
    for name in (joining.PREPARED, joining.COLD):
        assert figures[f"{name}: {pauses.PAUSE}"]["value"] > 0
        assert figures[f"{name}: {joining.SENT}"]["unit"] == "MiB"
    assert f"{joining.PREPARED}: {joining.REHEARSAL}" in figures
    assert f"{joining.COLD}: {joining.REHEARSAL}" not in figures


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_time_of_a_job_that_is_hurt_is_accounted_for(faulted: Faulted) -> None:
    from holdfast.tools.bench.faults import goodput

    figures = faulted("goodput", "--minutes", "0.05")
    shares = [each for name, each in figures.items() if name.startswith("lost: ")]
    useful = figures[goodput.USEFUL]["value"]
    assert 0 < useful < 1
    assert useful + sum(each["value"] for each in shares) == pytest.approx(1)
    assert figures[goodput.RATE]["value"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_training_is_measured_beside_environment_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.tools.bench.environments import section

    words = ("environments", "--quick", "--repeat", "1", "--dir", str(tmp_path), "--json", "-")
    assert main(["bench", *words]) == 0
    assert list(tmp_path.iterdir()) == []
    figures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert figures[f"{section.ALONE}: {section.STEPS}"]["value"] > 0
    for name in (section.YIELDING, section.EQUAL):
        assert figures[f"{name}: {section.STEPS}"]["versus"] == f"{section.ALONE}: {section.STEPS}"
    assert figures[section.PRIVATE]["value"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_job_of_reinforcement_learning_is_timed_and_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.adapters.rl.environments.registry import EnvironmentConfig
    from holdfast.tools.bench import rl

    modes = {name: changes for name, changes in rl._MODES.items() if name != "fixed_lag(2)"}
    monkeypatch.setattr(rl, "_MODES", modes)
    monkeypatch.setattr(rl, "_QUICK_STEPS", 4)
    tool = EnvironmentConfig(factory="slow_tool", settings={"latency_s": 0.01, "turns": 1})
    workload = msgspec.structs.replace(rl.WORKLOAD, environment=tool, groups=4, max_new_tokens=16)
    monkeypatch.setattr(rl, "WORKLOAD", workload)
    words = ("rl", "--quick", "--repeat", "1", "--dir", str(tmp_path), "--json", "-")
    assert main(["bench", *words]) == 0
    assert list(tmp_path.iterdir()) == []
    figures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    for name in modes:
        assert figures[f"{name}: {rl.RATE}"]["value"] > 0
    assert figures[f"bounded(2): {rl.RATE}"]["versus"] == f"sync: {rl.RATE}"
    assert 4 < figures["protecting rollouts: bytes per token"]["value"] < 64
    assert figures[f"{rl.LOST}: its work taken back"]["value"] > 0
    assert figures[f"{rl.TRAINER_LOST}: tokens/s meanwhile, beside before"]["value"] >= 0


def test_sums_are_timed_and_only_plain_ones_depend_on_the_number_of_ranks(
    tmp_path: Path,
) -> None:
    from holdfast.tools.bench.exact import section as exact

    setup = BenchSetup(
        size_bytes=1 << 16, repeat=1, directory=tmp_path, lap=lambda: None, quick=True
    )
    found = exact.exact(setup, worlds=(1, 2))
    figures = {figure.name: figure.value for figure in found}
    assert figures["2 ranks, plain: moved"] > 0
    assert figures["2 ranks, plain: drift"] > 0
    for method in ("float32", "int64"):
        assert figures[f"2 ranks, {method}: moved"] == figures[f"2 ranks, {method}: drift"] == 0
        assert figures[f"2 ranks, {method}: step"] > 0
    for kind in ("error", "error, spread"):
        assert figures[f"1 ranks, int64: {kind}"] < figures[f"1 ranks, plain: {kind}"]
        assert figures[f"1 ranks, plain: {kind}"] < figures[f"1 ranks, float32: {kind}"] < 1e-2
    shown = io.StringIO()
    exact.show(found, console=Console(file=shown, width=160))
    assert "2 ranks, all_reduce" in shown.getvalue()
    for extra in ("watch over 1,000 gradients, a microbatch", "BatchNorm, a forward"):
        assert figures[f"{extra}: times"] > 1
        assert extra in shown.getvalue()
    assert figures["comparison of 8 MiB of state: times"] > 0
    assert figures["Muon on sharded matrices, a step: with it"] > 0


def test_a_store_is_measured_beside_its_plain_client(
    object_environment: ObjectPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    root, pid = object_environment.url, str(os.getpid())  # any process may stand for the server's
    words = ("--store", root, "--server", pid, "--megabytes", "12", "--repeat", "1", "--json", "-")
    assert main(["bench", "store", *words]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    plain = "boto3" if object_environment.kind == "s3" else "obstore"
    assert {(figure["name"], figure["versus"]) for figure in figures if figure["versus"]} == {
        (ours, f"{plain} {theirs}{number}")
        for ours, theirs in (("write", "put"), ("read", "get"))
        for number in ("", ", eight at once")
    }
    extra = {figure["name"]: figure["value"] for figure in figures if not figure["versus"]}
    assert extra["write: processor time of write"] > 0
    assert extra[f"read: processor time of {plain} get, eight at once"] > 0
    assert "write: processor time of the server for write" in extra
    assert extra[f"write: {plain} put / {plain} get"] > 0
    assert open_store(root).names("") == []


@pytest.mark.parametrize("text", ["x", "", "0", "4711,"])
def test_processes_of_a_server_that_are_not_there_are_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "store", "--server", text])
    assert "does not name running processes" in capsys.readouterr().err


def test_a_store_that_is_not_named_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "store", "--megabytes", "1"]) == EXIT_USAGE
    assert "--store az://container/prefix" in capsys.readouterr().err
