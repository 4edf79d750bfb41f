"""Checkpoints that Megatron-core wrote, TP × PP and TP × EP, open with the contents of its ranks.

`megatron/make_megatron.py` made them. The digests beside them come from the memory of the ranks.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from holdfast import ckpt
from holdfast.adapters.dcp import DcpSource
from holdfast.ckpt.convert.interchange import TensorSource
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.grid import whole
from holdfast.tools.cli import main

Array = npt.NDArray[Any]

FOLDER = Path(__file__).parent / "megatron"
SIZES = {"vocabulary": 10, "kv_heads": 2, "heads_per_group": 2, "padded_to": 6}
RANKS = 2
"""Ranks of tensor parallelism in the samples that have any."""


@pytest.fixture(scope="module", params=["dense", "experts"])
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(request.param, tmp_path_factory.mktemp("megatron"))


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def model_of(sample: Path) -> str:
    return "megatron-llama" if sample.name == "dense" else "megatron-moe"


def tensors(source: TensorSource) -> dict[str, Array]:
    return {
        name: np.frombuffer(source.read(name, whole(spec.shape)), spec.dtype).reshape(spec.shape)
        for name, spec in source.specs.items()
    }


def of_patterns(path: Path, patterns: str) -> dict[str, Array]:
    chosen = ckpt.Patterns.read(patterns, sizes=SIZES)
    with ckpt.PatternedSource(DcpSource(path), chosen) as source:
        return tensors(source)


def stored_name(name: str) -> str:
    """Return the name in the checkpoint of a parameter of a rank."""
    name = name.replace("input_layernorm", "self_attention.linear_qkv.layer_norm_weight.")
    name = name.replace("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight.")
    return name.replace("_weight..weight", "_weight")


def held(name: str, array: Array, rank: int) -> Array:
    """Return the part of a tensor that a rank of tensor parallelism holds."""
    if "linear_fc1.weight" in name:  # the gate above the values, each cut by itself
        gate, up = np.split(array, 2)
        return np.concatenate([np.split(gate, RANKS)[rank], np.split(up, RANKS)[rank]])
    if "linear_proj" in name or "linear_fc2" in name:
        return np.split(array, RANKS, axis=1)[rank]
    if any(part in name for part in ("linear_qkv.weight", "linear_qkv.bias", "word_emb", "output")):
        return np.split(array, RANKS)[rank]
    return array


def digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def test_every_parameter_and_moment_of_every_rank_is_in_the_tensors(sample: Path) -> None:
    found = of_patterns(sample, "megatron")
    wanted: Mapping[str, str] = json.loads((FOLDER / f"{sample.name}.json").read_text())
    assert len(wanted) > 30
    for place, expected in wanted.items():
        kind, rank, name = place.split("/")
        prefix = "" if kind == "model" else f"optimizer.state.{kind}."
        array = found[prefix + stored_name(name)]
        assert digest(held(name, array, int(rank))) == expected, place


def test_common_values_and_the_iteration_are_kept_and_the_rest_is_reported(sample: Path) -> None:
    with DcpSource(sample) as source:
        assert source.step == 7
        assert source.values["common.iteration"] == 7
        assert source.values["common.args"]["num_layers"] == 2
        assert "attention_backend" not in source.values["common.args"]
        assert not any(name.startswith("rng_state") for name in source.values)
        classes, objects = source.told
    assert "common.args.attention_backend (megatron.core.transformer.enums.AttnBackend)" in classes
    assert "4 objects of Megatron that are not plain were left out: rng_state/shard_0_4" in objects


def test_a_model_gets_its_names_and_goes_back(sample: Path) -> None:
    found = of_patterns(sample, model_of(sample))
    assert found["model.embed_tokens.weight"].shape == (10, 8)
    fused = of_patterns(sample, "megatron")["decoder.layers.1.self_attention.linear_qkv.weight"]
    groups = fused.reshape(2, 4, 2, 8)  # of two heads for queries, one for keys, one for values
    for part, heads in (("q", slice(0, 2)), ("k", slice(2, 3)), ("v", slice(3, 4))):
        array = found[f"model.layers.1.self_attn.{part}_proj.weight"]
        np.testing.assert_array_equal(array, groups[:, heads].reshape(-1, 8))
    assert {name.partition("model.")[0] for name in found if name.startswith("optimizer")} == {
        "optimizer.state.param.",
        "optimizer.state.exp_avg.",
        "optimizer.state.exp_avg_sq.",
        "optimizer.state.param.lm_head.weight",
        "optimizer.state.exp_avg.lm_head.weight",
        "optimizer.state.exp_avg_sq.lm_head.weight",
    }


def test_it_is_converted_loaded_into_any_layout_and_converted_back(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [each for name, n in SIZES.items() for each in ("--set", f"{name}={n}")]
    patterns = ["--patterns", model_of(sample), *sizes]
    assert main(["convert", str(sample), str(tmp_path / "ours"), "--dp", "3", *patterns]) == 0
    said = capsys.readouterr().out
    assert "rng_state/shard_0_4" in said
    assert "2 of 12 along axis 0 were dropped as padding" in said
    found = of_patterns(sample, model_of(sample))
    state = {name: torch.zeros(array.shape) for name, array in found.items()}
    name = "optimizer.state.exp_avg.model.layers.1.self_attn.o_proj.weight"
    state[name] = part = torch.zeros(8, 2)
    held_here = ckpt.TensorShard(part, shape=(8, 8), offset=(0, 6))
    report = ckpt.load(tmp_path / "ours", {**state, name: held_here}, strict="ignore-extra")
    assert report.step == 7
    for key, tensor in state.items():
        wanted = found[key][:, 6:] if key == name else found[key]
        np.testing.assert_array_equal(tensor.numpy(), wanted)
    back = ["--reverse", *patterns]
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "b.zarr"), *back]) == 0
    from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource

    with ZarrDirectorySource(tmp_path / "b.zarr") as again, DcpSource(sample) as first:
        one, experts = tensors(again), sample.name == "experts"
        other = {as_written_back(n, experts=experts): a for n, a in tensors(first).items()}
    assert one.keys() == other.keys()
    for key, array in other.items():
        np.testing.assert_array_equal(one[key], array)


def as_written_back(name: str, *, experts: bool) -> str:
    """Return the name under which a tensor comes back: that of Transformer Engine's modules."""
    if not experts:
        return name
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def test_a_checkpoint_of_megatron_names_loads_through_patterns(
    sample: Path, tmp_path: Path
) -> None:
    assert main(["convert", str(sample), str(tmp_path / "ours")]) == 0
    found = of_patterns(sample, model_of(sample))
    state = {name: torch.zeros(array.shape) for name, array in found.items()}
    chosen = ckpt.Patterns.read(model_of(sample), sizes=SIZES)
    ckpt.load(tmp_path / "ours", state, patterns=chosen, strict="ignore-extra")
    for name, tensor in state.items():
        np.testing.assert_array_equal(tensor.numpy(), found[name])


def test_buckets_of_the_distributed_optimizer_are_refused_with_a_remedy(tmp_path: Path) -> None:
    path = unpacked("buckets", tmp_path)
    with pytest.raises(MismatchError, match=r"bucket_idx_0\.\w+: .* fully_reshardable"):
        of_patterns(path, "megatron")
