"""Stored directories of DeepSpeed are read; DeepSpeed's own tool says what they hold.

``tests/adapters/make_deepspeed_samples.py`` made them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from doubles.interchange import read_all

from holdfast.ckpt.convert.deepspeed.universal_source import UniversalSource
from holdfast.ckpt.convert.deepspeed.zero_source import NamedTensors, ZeroSource

ROOT = Path(__file__).parent / "deepspeed"
DIGESTS: dict[str, dict[str, dict[str, str]]] = json.loads((ROOT / "digests.json").read_text())
TRAINED = ["down.bias", "down.weight", "embed.weight", "up.bias", "up.weight"]


def opened(name: str) -> NamedTensors:
    return UniversalSource(ROOT / name) if name == "universal" else ZeroSource(ROOT / name)


@pytest.mark.parametrize("name", [*DIGESTS, "universal"])
def test_every_bit_is_that_of_deepspeed_s_tool(name: str) -> None:
    wanted = DIGESTS["zero3" if name == "universal" else name]
    assert set(TRAINED) <= set(wanted)
    with opened(name) as source:
        found = read_all(source)
        for parameter in TRAINED:
            state = f"optimizer.state.model.{parameter}"
            for key, digest in wanted[parameter].items():
                fqn = f"model.{parameter}" if key == "fp32" else f"{state}.{key}"
                assert hashlib.sha256(found[fqn]).hexdigest()[:16] == digest, fqn
            assert {f"{state}.step", f"{state}.exp_avg", f"{state}.exp_avg_sq"} <= set(found)


@pytest.mark.parametrize("name", [*DIGESTS, "universal"])
def test_everything_else_is_there(name: str) -> None:
    with opened(name) as source:
        assert source.step == 2
        assert source.aliases == {"model.head.weight": "model.embed.weight"}
        assert source.specs["model.scale"].shape == (7,)
        assert source.specs["model.count"].dtype == "int64"
        assert source.specs["noise.state"].shape == (4,)
        assert source.values["tokens"] == 1234
        assert source.values["noise.names"] == ["a", "b"]
        assert source.values["optimizer.groups.0.params"][0] == "model.embed.weight"
        assert source.values["optimizer.groups.1.weight_decay"] == 0.0
        assert "last_epoch" in str(source.values["lr_scheduler"])
        assert source.values["deepspeed.global_samples"] == 24


def test_a_frozen_parameter_has_no_padding_of_its_partitions() -> None:
    """Stage 3 cuts seven elements for two ranks; the eighth is whatever was in memory."""
    with ZeroSource(ROOT / "zero3") as three, ZeroSource(ROOT / "zero2") as two:
        assert read_all(three)["model.scale"] == read_all(two)["model.scale"]


def test_the_samples_are_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 150_000
