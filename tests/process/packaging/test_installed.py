"""Holdfast installed from a wheel, an sdist, git and an editable checkout works."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packages import BORROWED, Environment, build, call, clone, environment
from tree import ROOT

WAYS = ("wheel", "sdist", "git", "editable")
LARGEST_IMPORT = 60
"""Modules beyond those of a bare interpreter that `import holdfast` may bring."""

PROBE = """
import json, multiprocessing, sys
bare = set(sys.modules)

if __name__ == "__main__":
    import holdfast
    imported = sorted(set(sys.modules) - bare)

    import importlib.util
    from importlib.resources import files
    from holdfast.ckpt.native import isal, streaming
    from holdfast.tools.chaos.scenarios import scenario

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(isal.crc32c, (b"123456789",))
    folder = files("holdfast")
    print(json.dumps({
        "file": holdfast.__file__,
        "imported": imported,
        "spawned": spawned,
        "compiled": streaming.library() is not None and streaming.library()._name,
        "data": [name for name in sys.argv[1:] if folder.joinpath(name).is_file()],
        "old": [name for name in ("ckpt", "elastic", "adapters", "tools")
                if importlib.util.find_spec(name)],
    }))
"""

DATA = (
    "py.typed",
    "__init__.pyi",
    "ckpt/__init__.pyi",
    "elastic/__init__.pyi",
    "tools/report/page.css",
    "tools/report/page.html.j2",
    "tools/chaos/report/page.html.j2",
    "tools/chaos/faults/preloaded/_preload.c",
    "tools/chaos/survival/lose.toml",
    *(
        f"tools/chaos/scenarios/ready/{path.name}"
        for path in sorted(ROOT.glob("tools/chaos/scenarios/ready/*.toml"))
    ),
)

TRAINING = """
import json, os, sys

import adapters, ckpt.mine, elastic, tools.deep.below
import torch

import holdfast, holdfast.ckpt.store, holdfast.elastic.loop, holdfast.tools.show
import holdfast.adapters.rl.ledger


@holdfast.resilient(batch=holdfast.Batch(microbatches=2, size=2))
def train(run):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(2):
        for batch in run.microbatches(torch.ones(8, 4)):
            run.backward(model(batch).square().mean())
        run.step(optimizer)


if __name__ == "__main__":
    train()
    mine = [adapters, ckpt, ckpt.mine, elastic, tools, tools.deep.below]
    report = {
        "mine": [module.__file__ for module in mine],
        "path": sys.path,
        "argv": sys.argv,
        "safe_path": sys.flags.safe_path,
        "folder": os.getcwd(),
    }
    with open(os.environ["TOLD"], "w") as file:
        json.dump(report, file)
"""

USER = """
import torch

import holdfast


@holdfast.resilient(mesh=holdfast.Mesh(dp="auto"), batch=holdfast.Batch(microbatches=2, size=2))
def train(run: holdfast.Run, steps: int) -> float:
    model = torch.nn.Linear(4, 1)
    run.track(model=model)
    for step in run.steps(steps):
        run.check()
        print(step + 1)
    return 0.5


loss: float = train(3)
holdfast.save("runs/x", {"loss": loss}, step=3)
"""

MISTAKES = """
import holdfast

holdfast.Mesh(dp="all")  # mistake


@holdfast.resilient(mesh=holdfast.Mesh())
def train(run: holdfast.Run, steps: int) -> float:
    run.no_such_thing()  # mistake
    return 0.5


train("three")  # mistake
text: str = train(3)  # mistake
holdfast.no_such_thing  # mistake
"""


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Install in one of the ways, each once, into an environment of its own."""
    source = clone(tmp_path_factory.mktemp("source") / "checkout")

    @functools.cache
    def installed(way: str) -> Environment:
        folder = tmp_path_factory.mktemp(way)
        if way in ("wheel", "sdist"):
            return environment(folder, *build(source, folder / "dist", way))
        if way == "git":
            return environment(folder, f"git+file://{source}")
        return environment(folder, "--editable", source)

    return installed


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def installed(install: Callable[[str], Environment], way: str) -> Environment:
    return install(way)


@pytest.fixture
def wheel(install: Callable[[str], Environment]) -> Environment:
    return install("wheel")


@pytest.fixture(scope="module")
def probe(install: Callable[[str], Environment]) -> Callable[[str], dict[str, Any]]:
    """Return what a process of an environment, its `Environment.home` the folder, says of it."""

    @functools.cache
    def probed(way: str) -> dict[str, Any]:
        script = install(way).home / "probe.py"
        script.write_text(PROBE)
        found: dict[str, Any] = json.loads(install(way).run(script, *DATA))
        return found

    return probed


def test_nothing_else_lands_in_site_packages(
    installed: Environment, way: str, probe: Callable[[str], dict[str, Any]]
) -> None:
    landed = {path.name for path in installed.site.iterdir()} - {BORROWED}
    (described,) = (name for name in landed if name.endswith(".dist-info"))
    assert landed == {described, "_holdfast.pth" if way == "editable" else "holdfast"}
    assert probe(way)["old"] == []


def test_it_is_imported_from_where_it_was_installed(
    installed: Environment, way: str, probe: Callable[[str], dict[str, Any]]
) -> None:
    where = Path(probe(way)["file"])
    if way == "editable":
        (source,) = installed.site.joinpath("_holdfast.pth").read_text().split()
        assert where == Path(source) / "holdfast" / "__init__.py"
        assert [path.name for path in Path(source).iterdir()] == ["holdfast"]
    else:
        assert where == installed.site / "holdfast" / "__init__.py"


def test_importing_it_brings_no_torch_and_little_else(
    way: str, probe: Callable[[str], dict[str, Any]]
) -> None:
    imported = probe(way)["imported"]
    assert not {"torch", "numpy", "zmq", "zarr", "msgspec"} & set(imported)
    assert len(imported) < LARGEST_IMPORT, imported


def test_a_spawned_process_finds_its_functions(
    way: str, probe: Callable[[str], dict[str, Any]]
) -> None:
    assert probe(way)["spawned"] == 0xE3069283


def test_its_compiled_half_is_there_and_used(
    way: str, probe: Callable[[str], dict[str, Any]]
) -> None:
    beside = Path(probe(way)["file"]).parent / "ckpt" / "native" / "_stream.so"
    assert probe(way)["compiled"] == str(beside)


def test_its_data_is_there(way: str, probe: Callable[[str], dict[str, Any]]) -> None:
    assert probe(way)["data"] == list(DATA)


def test_its_modules_and_commands_start(installed: Environment) -> None:
    assert "--config-fd" in installed.run("-m", "holdfast.ckpt.sidecar", "--help")
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+\S*\n", installed.holdfast("--version"))


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a script, and beside it packages named as Holdfast's folders are."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("adapters", "ckpt", "elastic", "tools", "tools/deep"):
        folder.joinpath(name).mkdir()
        folder.joinpath(name, "__init__.py").touch()
    for name in ("ckpt/mine.py", "tools/deep/below.py"):
        folder.joinpath(name).touch()
    folder.joinpath("train.py").write_text(TRAINING)
    return folder


def report_of(wheel: Environment, words: list[str], *, script: Path, cwd: Path, by: str) -> Any:
    """Return what the user's script tells that Python or `holdfast run` starts with ``words``."""
    note = wheel.home / f"{by}.json"
    command = [wheel.folder / "bin" / "holdfast", "run"] if by == "run" else [wheel.python]
    call(*command, *words, "--option", cwd=cwd, env={"TOLD": str(note)})
    found = json.loads(note.read_text())
    assert {Path(file).is_relative_to(script.parent) for file in found["mine"]} == {True}
    return found


def test_a_script_meets_its_own_neighbours_by_python_and_by_holdfast_run(
    wheel: Environment, neighbours: Path, tmp_path: Path
) -> None:
    script = neighbours / "train.py"
    by_hand = report_of(wheel, [str(script)], script=script, cwd=tmp_path, by="python")
    assert by_hand["path"][0] == str(neighbours)
    assert report_of(wheel, [str(script)], script=script, cwd=tmp_path, by="run") == by_hand


def test_a_module_meets_its_own_neighbours_by_python_and_by_holdfast_run(
    wheel: Environment, neighbours: Path
) -> None:
    script = neighbours / "train.py"
    by_hand = report_of(wheel, ["-m", "train"], script=script, cwd=neighbours, by="python")
    assert report_of(wheel, ["-m", "train"], script=script, cwd=neighbours, by="run") == by_hand


def checked(wheel: Environment, text: str, folder: Path, *, status: int = 0) -> str:
    """Have mypy check a user's script, torch aside, against the environment; return its words."""
    script, settings = folder / "script.py", folder / "mypy.ini"
    script.write_text(text)
    settings.write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    words = ["-m", "mypy", "--python-executable", wheel.python, "--config-file", settings]
    words += ["--cache-dir", wheel.home / "mypy", script]
    return call(sys.executable, *words, cwd=folder, status=status).stdout


def test_mypy_takes_a_users_script(wheel: Environment, tmp_path: Path) -> None:
    assert checked(wheel, USER, tmp_path).startswith("Success")


def test_mypy_sees_a_users_mistakes(wheel: Environment, tmp_path: Path) -> None:
    found = checked(wheel, MISTAKES, tmp_path, status=1)
    at = [int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line]
    lines = MISTAKES.splitlines()
    assert at == [number for number, line in enumerate(lines, 1) if "# mistake" in line], found


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_demo_runs_from_the_wheel(wheel: Environment) -> None:
    said = wheel.holdfast("demo", "--quick", "--report-dir", wheel.home / "report")
    assert (wheel.home / "report" / "report.html").is_file(), said
