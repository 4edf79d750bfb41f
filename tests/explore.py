"""Run all property tests and state machines with new examples until a time is over.

    make explore MINUTES=60
    make explore MINUTES=5 ARGS='tests/property/rl'

CI draws the same examples every time. Here each file runs with a seed of its own and ten times the
examples, in an order drawn anew, round after round. A failure is printed with the command that
repeats it, and its output is kept in the folder ``.explore``. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
KEPT: Final = ROOT / ".explore"
_PASSED, _FAILED, _NOTHING_SELECTED = 0, 1, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One file of tests and the seed that its examples are drawn from."""

    path: str
    seed: int

    @property
    def options(self) -> list[str]:
        """The arguments of pytest."""
        return [
            self.path,
            *("-m", "hypothesis", "-x", "--timeout=0", "-p", "no:cacheprovider"),
            *("--hypothesis-profile=explore", f"--hypothesis-seed={self.seed}"),
        ]

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return " ".join([".venv/bin/python", "-m", "pytest", *self.options])


def files(below: Sequence[str]) -> list[str]:
    """Return the test files below these paths that use Hypothesis, relative to the root."""
    tests = sorted(
        path
        for each in below
        for path in ([ROOT / each] if each.endswith(".py") else (ROOT / each).rglob("test_*.py"))
    )
    found = [each for each in tests if "hypothesis" in each.read_text()]
    if not found:
        raise SystemExit(f"no property test lies below {', '.join(below)}")
    return [str(each.relative_to(ROOT)) for each in found]


def tries(paths: Sequence[str], rng: random.Random) -> Iterator[Try]:
    """Yield every file in an order drawn anew, round after round, each time with a new seed."""
    while True:
        for path in rng.sample(paths, len(paths)):
            yield Try(path=path, seed=rng.randrange(2**32))


def attempt(one: Try, *, deadline_s: float) -> bool | None:
    """Run one try; return whether it passed, None where the time was over before."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return None
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *one.options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode in (_PASSED, _NOTHING_SELECTED):
        return True
    KEPT.mkdir(exist_ok=True)
    kept = KEPT / f"{Path(one.path).stem}-{one.seed}.txt"
    kept.write_bytes(one.command.encode() + b"\n\n" + output)
    print(f"failed: {one.command}\n        {kept.relative_to(ROOT)}", flush=True)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--seed", type=int, default=None, help="of the seeds and the order")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files and folders of tests")
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    todo, deadline_s = tries(files(options.paths), random.Random(seed)), options.minutes * 60
    deadline_s += time.monotonic()
    print(f"exploring for {options.minutes:g} minutes, --seed {seed}", flush=True)

    taking = threading.Lock()

    def work(_: int) -> list[tuple[Try, bool]]:
        done: list[tuple[Try, bool]] = []
        while time.monotonic() < deadline_s:
            with taking:
                one = next(todo)
            if (passed := attempt(one, deadline_s=deadline_s)) is not None:
                done.append((one, passed))
        return done

    with ThreadPoolExecutor(options.jobs) as pool:
        done = [each for part in pool.map(work, range(options.jobs)) for each in part]
    failed = [one for one, passed in done if not passed]
    covered = len({one.path for one, _ in done})
    print(f"{len(done)} runs of {covered} files, {len(failed)} failed")
    for one in failed:
        print(f"  {one.command}")
    return _FAILED if failed else _PASSED


if __name__ == "__main__":
    sys.exit(main())
