"""Run the tests of the seams with torch under several versions of Python and torch.

    make matrix ARGS='--python python3.11 --python python3.13 --torch 2.14.1 --torch 2.15.0'

Each pair gets its own virtual environment below ``--folder``, with the versions of
``constraints.txt`` for everything but torch. PyPI's torch includes CUDA: an environment takes about
six gigabytes, and is removed after its tests unless ``--keep`` is given. The results of every pair
that was ever run in the folder are written as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

TORCHES: Final = ("2.13.0", "2.14.1", "2.15.0")
"""The newest release of each minor version that is supported."""

SEAMS: Final = (
    "tests/unit/ckpt/test_torch_private.py",
    "tests/unit/ckpt/state",
    "tests/unit/ckpt/snapshot",
    "tests/unit/dcp",
    "tests/unit/elastic/channel",
    "tests/unit/elastic/data",
    "tests/unit/elastic/gradients",
    "tests/unit/elastic/groups",
    "tests/unit/elastic/loop",
    "tests/unit/elastic/meeting",
    "tests/unit/elastic/rendezvous",
    "tests/unit/hf",
    "tests/unit/shared",
    "tests/property/elastic/gradients",
    "tests/process/ckpt/test_layout_ranks.py",
    "tests/process/dcp/test_dcp_ranks.py",
    "tests/process/elastic/test_collectives.py",
    "tests/process/elastic/test_data_workers.py",
    "tests/process/elastic/test_exactness.py",
    "tests/process/elastic/test_expert_training.py",
    "tests/process/elastic/test_mesh_training.py",
    "tests/process/elastic/test_norms.py",
    "tests/process/elastic/test_own_loaders.py",
    "tests/process/elastic/test_pipeline_training.py",
    "tests/process/elastic/test_rehearsal.py",
    "tests/process/elastic/test_running_stats.py",
    "tests/process/elastic/test_scaled_updates.py",
    "tests/process/elastic/test_sparse_gradients.py",
    "tests/process/elastic/test_torchrun_rendezvous.py",
    "tests/process/elastic/test_updates.py",
    "tests/process/elastic/test_whole_tensors.py",
    "tests/process/elastic/test_wrappings.py",
)
"""Tests that fail when torch changes under Holdfast: its private names, groups and meshes, FSDP and
DTensor shards, exact sums, norms and updates, pipelines, data workers, rehearsals, rendezvous,
checkpoints of its own and of DCP."""

_COUNT: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the tests under one Python and one torch."""

    python: str
    torch: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every pair, one after the other; return 1 if any test failed."""
    options = _parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    pairs = [
        (_version(python), python, torch) for python in options.python for torch in options.torch
    ]
    outcomes = []
    for version, python, torch in pairs:
        environment = options.folder / f"python{version}-torch{torch}"
        if not (environment / "installed").exists():
            print(f"installing into {environment}", flush=True)
            install(environment, python=python, torch=torch, folder=options.folder)
        if options.install_only:
            continue
        outcome = run_tests(environment, version=version, torch=torch, tests=options.tests)
        (options.folder / f"{environment.name}.json").write_text(json.dumps(asdict(outcome)))
        outcomes.append(outcome)
        if not options.keep:
            shutil.rmtree(environment)
    if (text := table(found(options.folder))) and options.table:
        options.table.write_text(text)
    print(text)
    return int(any(outcome.failed for outcome in outcomes))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated")
    parser.add_argument("--torch", action="append", help="a version of torch; may be repeated")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "matrix")
    parser.add_argument("--table", type=Path, help="a file for the Markdown table")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument(
        "--install-only", action="store_true", help="make environments, run nothing"
    )
    parser.add_argument("tests", nargs="*", default=list(SEAMS), help="instead of the seams'")
    options = parser.parse_args(arguments)
    options.python = options.python or [sys.executable]
    options.torch = options.torch or list(TORCHES)
    return options


def _version(python: str) -> str:
    """Return the version of an interpreter, such as ``3.11``."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def install(environment: Path, *, python: str, torch: str, folder: Path) -> None:
    """Make a virtual environment with this torch and what the tests need."""
    shutil.rmtree(environment, ignore_errors=True)
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--constraint", str(constraints)]
    unpack = folder / "unpack"  # wheels of gigabytes may be larger than /tmp
    unpack.mkdir(exist_ok=True)
    subprocess.run(
        [*pip, f"torch=={torch}", "--editable", f"{ROOT}[data,s3,obstore,etcd,dev]"],
        check=True,
        env={**os.environ, "TMPDIR": str(unpack)},
    )
    (environment / "installed").touch()


def run_tests(environment: Path, *, version: str, torch: str, tests: Sequence[str]) -> Outcome:
    """Run the tests in an environment."""
    report = environment / "report.txt"
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    with report.open("w") as file:
        subprocess.run([*command, "-rfE", *tests], cwd=ROOT, stdout=file, stderr=file, check=False)
    text = report.read_text()
    print(text[-2000:], flush=True)
    return outcome_of(text, version=version, torch=torch)


def outcome_of(text: str, *, version: str, torch: str) -> Outcome:
    """Read what pytest printed. Raises ``ValueError`` where it ran no test."""
    last = next((line for line in reversed(text.splitlines()) if _COUNT.search(line)), None)
    if last is None:
        raise ValueError(f"Python {version}, torch {torch}: pytest ran no test: {text[-500:]}")
    counts = {kind.rstrip("s"): int(count) for count, kind in _COUNT.findall(last)}
    seconds = re.search(r"in ([\d.]+)s", last)
    return Outcome(
        python=version,
        torch=torch,
        passed=counts.get("passed", 0),
        failed=tuple(sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)))),
        skipped=counts.get("skipped", 0),
        seconds=round(float(seconds[1])) if seconds else 0,
    )


def found(folder: Path) -> Iterator[Outcome]:
    """Yield the outcomes that lie in a folder, in the order of the versions."""
    rows = [json.loads(path.read_text()) for path in folder.glob("python*-torch*.json")]
    for row in sorted(rows, key=lambda row: (_numbers(row["python"]), _numbers(row["torch"]))):
        yield Outcome(**{**row, "failed": tuple(row["failed"])})


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def table(outcomes: Iterator[Outcome]) -> str:
    """Return a Markdown table, a row for each pair."""
    rows = ["| Python | torch | passed | failed | skipped |", "|---|---|---|---|---|"]
    for each in outcomes:
        failed = ", ".join(f"`{name.partition('::')[2] or name}`" for name in each.failed) or "0"
        rows.append(f"| {each.python} | {each.torch} | {each.passed} | {failed} | {each.skipped} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
