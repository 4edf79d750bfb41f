"""Pattern files, shipped ones, and loads through them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import ckpt
from holdfast.ckpt.convert.patterns.choice import Patterns, shipped
from holdfast.ckpt.errors import ArgumentError, MismatchError, NotFoundError

ROWS = """
format = 1
drop = ["*.rng"]
[[pattern]]
name = "rows"
pieces = "tp{tp}.{name...}"
whole = "model.{name...}"
where = { name = ".*weight" }
join = [{ over = "tp", as = "fragment", axis = 1 }]
[[pattern]]
name = "norms"
pieces = "tp{tp}.{name...}"
whole = "model.{name...}"
where = { name = ".*norm|epoch" }
join = [{ over = "tp", as = "replicate" }]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.toml").write_text(ROWS)
    return tmp_path / "rows.toml"


def test_every_shipped_file_is_read() -> None:
    assert shipped() == ["gpt", "llama", "megatron", "megatron-llama", "megatron-moe", "moe"]
    for name in shipped():
        assert Patterns.read(name).file.patterns


def test_a_file_that_is_missing_or_wrong_is_named(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nope: no pattern file .* one of gpt, llama"):
        Patterns.read("nope")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"odd\.toml: no text in UTF-8"):
        Patterns.read(tmp_path / "odd.toml")
    with pytest.raises(ArgumentError, match=r"sizes\(tp='two'\): give each size as a whole"):
        Patterns.read(rows, sizes={"tp": "two"})  # type: ignore[dict-item]


def test_a_load_sees_the_tensors_that_patterns_make(
    tmp_path: Path, rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full, norm = torch.arange(24.0).reshape(3, 8), torch.ones(3)
    saved = {
        f"tp{rank}": {
            "weight": full[:, 4 * rank : 4 * rank + 4].clone(),
            "norm": norm.clone(),
            "rng": torch.zeros(4),
            "epoch": 3,
        }
        for rank in range(2)
    }
    ckpt.save(
        tmp_path / "root", {f"{k}.{n}": v for k, d in saved.items() for n, v in d.items()}, step=5
    )
    state = {"model": {"weight": torch.zeros(3, 8), "norm": torch.zeros(3), "epoch": 0}}
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    with caplog.at_level(logging.WARNING):
        report = ckpt.load(tmp_path / "root", flat, patterns=rows)
    assert torch.equal(flat["model.weight"], full)
    assert torch.equal(flat["model.norm"], norm)
    assert (report.step, report.tensors) == (5, 2)
    assert "2 tensors were left out" in caplog.text
    part = torch.zeros(3, 3)
    shard = ckpt.TensorShard(part, shape=(3, 8), offset=(0, 3))
    ckpt.load(tmp_path / "root", {"model.weight": shard}, patterns=str(rows), strict="ignore-extra")
    assert torch.equal(part, full[:, 3:6])


def test_a_load_whose_replicas_differ_changes_nothing(tmp_path: Path, rows: Path) -> None:
    saved = {
        "tp0.weight": torch.ones(2, 2),
        "tp1.weight": torch.ones(2, 2),
        "tp0.norm": torch.ones(2),
        "tp1.norm": torch.zeros(2),
    }
    ckpt.save(tmp_path / "root", saved, step=5)
    state = {"model.weight": torch.zeros(2, 4), "model.norm": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"rows\.toml: pattern 'norms': the replicas tp0\.norm"):
        ckpt.load(tmp_path / "root", state, patterns=rows)
    assert not any(tensor.any() for tensor in state.values())


def test_values_of_single_ranks_are_refused(tmp_path: Path, rows: Path) -> None:
    saved = {"tp0.norm": torch.ones(2), "game": ckpt.PerRank({"level": 3})}
    ckpt.save(tmp_path / "root", saved, step=5)
    with pytest.raises(MismatchError, match=r"the value game@0 belongs to one rank"):
        ckpt.load(tmp_path / "root", {"model.norm": torch.zeros(2)}, patterns=rows)


def test_patterns_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "root", {"a": torch.ones(2)}, step=5)
    with pytest.raises(ArgumentError, match=r"patterns is 3; give the path of a file"):
        ckpt.load(tmp_path / "root", {"a": torch.ones(2)}, patterns=3)  # type: ignore[arg-type]


TP = {
    "llama": {
        "model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
        "model.norm.weight": None,
        "model.layers.3.input_layernorm.weight": None,
        "model.layers.3.post_attention_layernorm.weight": None,
        "model.layers.3.self_attn.q_proj.weight": 0,
        "model.layers.3.self_attn.q_proj.bias": 0,
        "model.layers.3.self_attn.k_norm.weight": None,
        "model.layers.3.self_attn.o_proj.weight": 1,
        "model.layers.3.mlp.gate_proj.weight": 0,
        "model.layers.3.mlp.down_proj.weight": 1,
    },
    "gpt": {
        "word_embeddings.weight": 0,
        "position_embeddings.weight": None,
        "layers.3.input_layernorm.bias": None,
        "layers.3.attention.query_key_value.weight": 0,
        "layers.3.attention.query_key_value.bias": 0,
        "layers.3.attention.dense.weight": 1,
        "layers.3.attention.dense.bias": None,
        "layers.3.mlp.dense_h_to_4h.weight": 0,
        "layers.3.mlp.dense_4h_to_h.weight": 1,
        "final_layernorm.weight": None,
    },
    "moe": {
        "model.embed_tokens.weight": 0,
        "model.layers.3.self_attn.q_proj.weight": 0,
        "model.layers.3.mlp.gate.weight": None,
        "model.layers.3.block_sparse_moe.gate.weight": None,
        "model.layers.3.block_sparse_moe.experts.5.w1.weight": 0,
        "model.layers.3.block_sparse_moe.experts.5.w2.weight": 1,
        "model.layers.3.mlp.experts.5.down_proj.weight": 1,
        "model.layers.3.mlp.shared_expert.up_proj.weight": 0,
        "model.norm.weight": None,
    },
}
"""Names of models and the dims that tensor parallelism cuts."""


@pytest.mark.parametrize("name", TP)
@pytest.mark.parametrize("before", ["", "optimizer.exp_avg."])
def test_ranks_of_tensor_parallelism_come_together(name: str, before: str, tmp_path: Path) -> None:
    saved, wanted = {}, {}
    for number, (each, axis) in enumerate(TP[name].items()):
        full = torch.arange(24.0).reshape(4, 6) + number
        wanted[before + each] = full
        pieces = [full] * 2 if axis is None else list(full.chunk(2, axis))
        for rank, piece in enumerate(pieces):
            ranks = [f"tp{rank}"] if name != "moe" else [f"ep{ep}.tp{rank}" for ep in range(2)]
            for place in ranks[:1] if re.search(r"experts\.\d", each) else ranks:
                saved[f"{place}.{before}{each}"] = piece.clone()
    ckpt.save(tmp_path / "root", saved, step=1)
    state = {key: torch.zeros(4, 6) for key in wanted}
    sizes = {"vocabulary": 4, "padded_to": 2}
    ckpt.load(tmp_path / "root", state, patterns=Patterns.read(name, sizes=sizes))
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(state[key].numpy(), tensor.numpy())
