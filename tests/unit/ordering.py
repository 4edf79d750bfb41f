"""The order of the test files: long ones first, so that none is left over at the end.

With ``pytest -n 2 --dist loadfile`` a process that has no file left takes the next. One of minutes
that begins last would keep that process busy while the other has nothing to do; the unit tests, of
seconds a file, fill the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

FOLDERS: Final = ("process", "docs", "sim", "property", "format", "services", "unit")

LONG: Final = (
    "process/test_bench.py",
    "process/test_demo.py",
    "process/test_etcd_coordinator.py",
    "process/test_mesh_jobs.py",
    "process/test_checkpoint_processes.py",
    "process/test_sidecar_command.py",
    "process/test_joint_launchers.py",
    "process/test_deaths_at_states.py",
    "process/test_network_faults.py",
    "process/test_loss_guard.py",
    "process/test_checkpoint_crash.py",
    "process/test_exactness.py",
    "process/test_train_loader.py",
    "process/test_survival.py",
    "process/test_chaos_run.py",
    "process/test_chaos_plugin.py",
    "process/test_rl_tensor_parallel.py",
    "process/test_rl_job.py",
    "process/test_rl_lora.py",
    "docs/test_my_loop.py",
    "process/test_chaos_check.py",
    "process/test_notice.py",
    "process/test_two_losses.py",
    "process/test_warm_join.py",
    "process/test_rewrite_process.py",
    "process/test_etcd_faults.py",
    "process/test_slot_deaths.py",
)
"""What takes longest, longest first, as ``--durations`` tells; below `tests`."""


def rank(path: PurePath, *, long: Sequence[str] = LONG) -> int:
    """Return the place of a test file: in ``long``, behind that by its folder."""
    name = f"{path.parent.name}/{path.name}"
    if name in long:
        return list(long).index(name)
    folder = path.parent.name
    place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return len(long) + place
