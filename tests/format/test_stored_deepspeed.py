"""Stored directories of DeepSpeed are read; DeepSpeed's own tool says what they hold.

``tests/adapters/make_deepspeed_samples.py`` made them, except ``mics``. That is of DeepSpeed
0.18.9, as 0.19.8 has no MiCS any more: two groups of two ranks on gloo, which has no coalesced
collectives, so all-gathers were made one by one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from doubles.interchange import read_all

from holdfast.ckpt.convert.deepspeed.universal_sink import UniversalSink
from holdfast.ckpt.convert.deepspeed.universal_source import UniversalSource
from holdfast.ckpt.convert.deepspeed.zero_source import NamedTensors, ZeroSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.state import plain

ROOT = Path(__file__).parent / "deepspeed"
DIGESTS: dict[str, dict[str, dict[str, str]]] = json.loads((ROOT / "digests.json").read_text())
TRAINED = ["down.bias", "down.weight", "embed.weight", "up.bias", "up.weight"]


def opened(name: str) -> NamedTensors:
    return UniversalSource(ROOT / name) if name == "universal" else ZeroSource(ROOT / name)


@pytest.mark.parametrize("name", [*DIGESTS, "universal"])
def test_every_bit_is_that_of_deepspeed_s_tool(name: str) -> None:
    wanted = DIGESTS["fp16" if name == "universal" else name]
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


@pytest.mark.parametrize("name", ["fp16", "universal"])
def test_the_loss_scale_of_fp16_is_kept_also_in_a_universal_directory(
    name: str, tmp_path: Path
) -> None:
    """DeepSpeed's own universal directory has its scaler as an object, ours the fields."""
    with opened(name) as source, UniversalSink(tmp_path / "u") as sink:
        kept = source.values["deepspeed.loss_scaler"]
        transfer(source, sink, step=source.step)
        assert any("loss_scaler" in note for note in sink.notes)
    scale = plain.decode(kept)
    assert (scale["cur_scale"], scale["cur_iter"], scale["last_overflow_iter"]) == (2**16, 2, 0)
    with UniversalSource(tmp_path / "u") as back:
        assert back.values["deepspeed.loss_scaler"] == kept
        assert back.values["deepspeed.skipped_steps"] == 1
    model = tmp_path / "u" / "global_step2" / "mp_rank_00_model_states.pt"
    assert torch.load(model, weights_only=True)["deepspeed_loss_scaler"] == scale


def test_frozen_parameters_of_fp16_keep_their_type() -> None:
    with ZeroSource(ROOT / "fp16") as source:
        assert source.specs["model.scale"].dtype == "float16"
        assert source.specs["model.up.weight"].dtype == "float32"


def test_files_of_mics_are_those_of_its_first_group(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mics", tmp_path, dirs_exist_ok=True)
    with ZeroSource(tmp_path) as source, ZeroSource(ROOT / "fp16") as other:
        assert source.values["deepspeed.dp_world_size"] == 4
        assert source.specs.keys() == other.specs.keys()
    for kind in ("optim", "model"):
        (lost,) = tmp_path.glob(f"*/*zero_pp_rank_1_mp_rank_00_{kind}_states.pt")
        lost.rename(tmp_path / "lost")
        with pytest.raises(NotFoundError, match=f"2 ranks saved it, 1 have a file .*{kind}"):
            ZeroSource(tmp_path)
        (tmp_path / "lost").rename(lost)


def test_the_samples_are_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 200_000
