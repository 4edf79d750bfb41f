"""The order of the test files: long ones first, so that none is left over at the end.

With ``pytest -n 2 --dist loadfile`` a process without a file takes the next one. A file of several
minutes that begins last would keep one process busy while the other is idle; the unit tests, of
seconds per file, fill the gaps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final
from xml.etree import ElementTree

FOLDERS: Final = (
    "process",
    "adapters",
    "loops",
    "docs",
    "sim",
    "property",
    "format",
    "services",
    "unit",
)

LONG: Final = (
    "loops/test_loops.py",
    "process/tools/test_check_command.py",
    "process/ckpt/test_object_store_faults.py",
    "process/ckpt/test_object_store_checkpoint.py",
    "process/ray/test_ray_parts.py",
    "process/rl/test_rl_job.py",
    "process/elastic/test_data_workers.py",
    "process/tools/test_demo.py",
    "loops/test_checks_of_loops.py",
    "process/elastic/test_agent.py",
    "process/ckpt/test_object_store_deaths.py",
    "process/elastic/test_leaving.py",
    "process/tools/test_bench.py",
    "process/hf/test_hf_trainer.py",
    "process/elastic/test_etcd_faults.py",
    "process/elastic/test_islands.py",
    "process/elastic/test_network_faults.py",
    "process/ckpt/test_checkpoint_processes.py",
    "process/packaging/test_installed.py",
    "docs/test_guides.py",
    "process/tools/test_run_command.py",
    "process/elastic/test_fixed_parts.py",
    "process/elastic/test_network_relay.py",
    "sim/test_schedules.py",
    "process/ckpt/test_checkpoint_crash.py",
    "process/chaos/test_chaos_run.py",
    "process/elastic/test_rebuilt.py",
    "process/tools/test_sidecar_command.py",
    "sim/test_seas.py",
    "process/elastic/test_etcd_job.py",
    "process/rl/test_engines.py",
    "process/elastic/test_stages.py",
    "process/elastic/test_partial_partition.py",
    "process/chaos/test_chaos_islands.py",
    "process/elastic/test_launcher_return.py",
    "process/elastic/test_notice.py",
    "process/ckpt/test_survival.py",
    "process/elastic/test_update_jobs.py",
    "sim/test_planted_bugs.py",
    "process/elastic/test_two_losses.py",
)
"""The test files of more than `LONG_S` seconds, longest first; paths below `tests`.

``python tests/ordering.py RESULT.xml`` prints them by the file that
``make test ARGS=--junitxml=RESULT.xml`` writes.
"""

LONG_S: Final = 30.0


def rank(path: PurePath, *, long: Sequence[str] = LONG) -> int:
    """Return the place of a test file: in ``long``, behind that by its first folder."""
    name = path.as_posix().rpartition("tests/")[2]
    if name in long:
        return list(long).index(name)
    folder = name.partition("/")[0]
    place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return len(long) + place


def longest(result: Path, *, tests: Path, at_least_s: float = LONG_S) -> list[str]:
    """Return the test files that took so long by a JUnit file of pytest, longest first."""
    seconds = Counter[str]()
    for case in ElementTree.parse(result).iter("testcase"):
        words = str(case.get("classname")).split(".")[1:]
        while words and not (tests / ("/".join(words) + ".py")).is_file():
            words.pop()  # it is a class in that file
        if words:
            seconds["/".join(words) + ".py"] += float(case.get("time") or 0.0)
    return [name for name, took_s in seconds.most_common() if took_s >= at_least_s]


if __name__ == "__main__":
    for found in longest(Path(sys.argv[1]), tests=Path(__file__).parent):
        print(f'    "{found}",')
