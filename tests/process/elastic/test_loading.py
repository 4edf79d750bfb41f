"""Training from a loader: short last steps have the right weight on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading_bodies import train_all
from ranks import ranks


def test_a_short_step_counts_by_its_samples_and_the_world_does_not_show(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 3):
        with ranks(world_size, train_all, tmp_path) as running:
            found += running.results()
    means = [of_rank.pop("means") for of_rank in found]
    alone = found[0]
    for result in alone.values():
        assert result["epochs"] == [0] * 4 + [1] * 4  # 23 samples, 7 a step: two are left
        assert result["steps"] == 8
    hashes = {name: result["hash"] for name, result in alone.items()}
    assert len(set(hashes.values())) == 2, "FSDP2 and plain models end alike, the data differ"
    assert all(of_rank == alone for of_rank in found)
    # samples 1, 2, 4, 8, 16 and then 32, 64: the gradient of both steps, and the logged values
    for of_rank in means:
        assert of_rank == pytest.approx([31 / 5, 31 / 5, 96 / 2, 96 / 2])
