"""The order of the test files: long ones first, so that none is left over at the end.

With ``pytest -n 2 --dist loadfile`` a process without a file takes the next one. A file of several
minutes that begins last would keep one process busy while the other is idle; the unit tests, of
seconds per file, fill the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

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
    "process/tools/test_bench.py",
    "process/tools/test_demo.py",
    "loops/test_loops.py",
    "process/elastic/test_etcd_coordinator.py",
    "process/elastic/test_mesh_jobs.py",
    "process/ckpt/test_checkpoint_processes.py",
    "process/tools/test_sidecar_command.py",
    "process/elastic/test_joint_launchers.py",
    "process/ckpt/test_deaths_at_states.py",
    "process/elastic/test_network_faults.py",
    "process/elastic/test_loss_guard.py",
    "process/ckpt/test_checkpoint_crash.py",
    "process/elastic/test_exactness.py",
    "process/elastic/test_train_loader.py",
    "process/ckpt/test_survival.py",
    "process/packaging/test_installed.py",
    "process/chaos/test_chaos_run.py",
    "process/chaos/test_chaos_plugin.py",
    "process/rl/test_rl_tensor_parallel.py",
    "process/rl/test_rl_job.py",
    "process/rl/test_rl_lora.py",
    "docs/test_my_loop.py",
    "process/chaos/test_chaos_check.py",
    "process/elastic/test_notice.py",
    "process/elastic/test_two_losses.py",
    "process/elastic/test_warm_join.py",
    "process/ckpt/test_rewrite_process.py",
    "process/elastic/test_etcd_faults.py",
    "process/ckpt/test_slot_deaths.py",
)
"""The longest test files by ``--durations``, longest first; paths below `tests`."""


def rank(path: PurePath, *, long: Sequence[str] = LONG) -> int:
    """Return the place of a test file: in ``long``, behind that by its first folder."""
    name = path.as_posix().rpartition("tests/")[2]
    if name in long:
        return list(long).index(name)
    folder = name.partition("/")[0]
    place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return len(long) + place
