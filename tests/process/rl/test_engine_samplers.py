"""A process that samples with engines for a loop, with the weights that the loop publishes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from completion_server import CONFIG, LIMITS
from tree import HELPERS

from holdfast.adapters.rl.engines.built_in import BuiltInEngine
from holdfast.adapters.rl.engines.sampling import sample_for
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.vllm.sources import PlacedWeights, PublishedWeights, WantedWeights

LOOP, STEPS, JOIN_S = HELPERS / "engine_loop.py", 3, 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class ReadingEngine(BuiltInEngine):
    """An engine that reads published weights by itself, as a vLLM server does."""

    def __init__(self, directory: Path, *, pinned: bool) -> None:
        super().__init__(build_policy(CONFIG), limits=LIMITS, slots=2, pinned=pinned)
        self._source = PublishedWeights(PlacedWeights(meeting=str(directory)))
        self.loads: list[tuple[int, int, int]] = []
        self.differences = 0

    def load(self, weights: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Load what was published, and compare it with what the sampler got."""
        found = self._source.fetch(WantedWeights(version=version))
        self.loads.append((version, found.read_bytes, found.kept_bytes))
        same = found.tensors.keys() == weights.keys()
        self.differences += not (
            same and all(torch.equal(weights[name], each) for name, each in found.tensors.items())
        )
        super().load(found.tensors, version=version)


def run_loop(folder: Path, mode: str) -> tuple[dict[str, Any], list[ReadingEngine]]:
    """Run the loop in a process of its own, and sample for it here with two engines."""
    meet, result = folder / "meet", folder / "result.json"
    engines = [ReadingEngine(meet, pinned=mode != "bounded") for _ in range(2)]
    words = [str(each) for each in (LOOP, mode, meet, STEPS, result)]
    with subprocess.Popen([sys.executable, *words], cwd=folder) as loop:
        try:
            sample_for(meet, engines, wait_s=JOIN_S)
            assert loop.wait(JOIN_S) == 0
        finally:
            loop.kill()
    found: dict[str, Any] = json.loads(result.read_text())
    return found, engines


@pytest.mark.parametrize("mode", ["fixed_lag", "bounded"])
def test_engines_sample_with_the_weights_that_they_read_by_themselves(
    mode: str, tmp_path: Path
) -> None:
    found, engines = run_loop(tmp_path, mode)
    assert found["violations"] == []
    assert len(found["tokens"]) == 4 * STEPS
    assert all(each == sorted(each) for each in found["versions"])
    if mode == "fixed_lag":
        for number, versions in enumerate(found["versions"]):
            assert set(versions) == {max(0, number // 4 - 1)}
    assert sum(engine.differences for engine in engines) == 0
    assert all(read > 0 for engine in engines for _, read, _ in engine.loads[:1])
