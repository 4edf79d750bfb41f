"""The peer of resharded loads really loads every rank's rows."""

from __future__ import annotations

from pathlib import Path

from holdfast.tools.bench.data_path.dcp_reshard import load_parts, save_parts
from holdfast.tools.bench.data_path.storage import parts_of
from holdfast.tools.bench.state import BenchState

NBYTES = 1 << 16


def test_torch_loads_the_rows_of_other_ranks_than_saved(tmp_path: Path) -> None:
    state, target = BenchState(NBYTES, seed=0), BenchState(NBYTES, seed=1)
    save_parts([parts_of(state, rank=rank, ranks=3)["state"] for rank in range(3)], tmp_path / "3")
    assert len([*(tmp_path / "3").glob("*.distcp")]) >= 2
    for ranks in (1, 2, 4):
        target.wipe()
        for rank in range(ranks):
            load_parts(parts_of(target, rank=rank, ranks=ranks)["state"], tmp_path / "3")
        state.require_equal(target, what=f"3 → {ranks}")
