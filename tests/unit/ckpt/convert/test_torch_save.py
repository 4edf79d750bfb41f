"""torch.save files: read without running their code, and written so that others can do the same."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.checkpoints import sample_arrays
from doubles.interchange import ArraySource, read_all
from torch import nn

from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.convert.torch_save import TorchSaveSink, TorchSaveSource
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, StateError, StoreError
from holdfast.ckpt.state import plain, torch_dtypes


def raw(tensor: torch.Tensor) -> bytes:
    found = tensor.detach().resolve_conj().contiguous()
    return torch_dtypes.as_carrier(found).reshape(-1).view(torch.uint8).numpy().tobytes()


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    embed = torch.randn(6, 4)
    return {
        "model": {
            "embed": embed,
            "head": embed,
            "columns": torch.randn(10, 10)[:, 2:5],
            "half": nn.Parameter(torch.randn(3, 3).bfloat16()),
            "tiny": torch.randn(4).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(3),
            "empty": torch.zeros(0, 2),
            "phase": torch.randn(3, dtype=torch.complex64).conj(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
        "epoch": 3,
        "best": float("inf"),
        "mixed": [torch.ones(2), {"a": b"bytes"}],
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_nested_dicts_become_dotted_names(saved: Path) -> None:
    source = TorchSaveSource(saved)
    found, wanted = read_all(source), state()
    for name, tensor in wanted["model"].items():
        assert found[f"model.{name}"] == raw(tensor)
        spec = source.specs[source.aliases.get(f"model.{name}", f"model.{name}")]
        assert (spec.dtype, spec.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
    assert found["optimizer.state.0.step"] == raw(torch.tensor(1.0))
    assert found["mixed.0"] == raw(torch.ones(2))
    assert source.aliases == {"model.head": "model.embed"}
    values = {name: plain.decode(value) for name, value in source.values.items()}
    assert values == {
        "optimizer.param_groups": state()["optimizer"]["param_groups"],
        "epoch": 3,
        "best": float("inf"),
        "mixed.1": {"a": b"bytes"},
    }


def test_what_is_written_loads_with_weights_only(saved: Path, tmp_path: Path) -> None:
    source, sink = TorchSaveSource(saved), TorchSaveSink(tmp_path / "new" / "b.pt")
    transfer(source, sink, memory_bytes=8 << 20)
    sink.close()
    for mapped in (False, True):
        found = torch.load(tmp_path / "new" / "b.pt", weights_only=True, mmap=mapped)
        assert {name: raw(t) for name, t in found.items() if isinstance(t, torch.Tensor)} == (
            read_all(source)
        )
        assert found["model.embed"].data_ptr() == found["model.head"].data_ptr()
        assert found["optimizer.param_groups"] == state()["optimizer"]["param_groups"]
        assert (found["best"], found["mixed.1"]) == (float("inf"), {"a": b"bytes"})
    assert zipfile.ZipFile(tmp_path / "new" / "b.pt").testzip() is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b.pt"]
    again = TorchSaveSource(tmp_path / "new" / "b.pt")
    assert (again.specs, again.aliases, again.values) == (
        source.specs,
        source.aliases,
        source.values,
    )


def test_a_tensor_inside_a_plain_value_is_the_same_tensor(tmp_path: Path) -> None:
    values = {"ema": {"$map": [["x", {"$tensor": "model.weight"}]]}, "rng": {"$rank": "rng"}}
    sink = TorchSaveSink(tmp_path / "a.pt")
    transfer(ArraySource(sample_arrays(), values=values), sink)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["ema"]["x"].data_ptr() == found["model.weight"].data_ptr()
    assert found["rng"] == {"$rank": "rng"}


class Strange:
    pass


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"x": Strange()}, r"type [\w.]*Strange, which is refused"),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear, which is refused"),
        ({"x": torch.eye(2).to_sparse()}, "x: layout torch.sparse_coo"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, "two entries are called a.b"),
        ({"x": {(1, 2): torch.ones(1)}}, r"x: key \(1, 2\) is not a non-empty string"),
        ([torch.ones(1)], "holds a list, a dict is needed"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, content: object, said: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(StateError, match=said):
        TorchSaveSource(tmp_path / "a.pt")


def test_files_that_torch_cannot_read_are_damaged(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(saved.read_bytes()[:500])
    (tmp_path / "junk.pt").write_bytes(b"junk" * 100)
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("cut.pt", "junk.pt", "old.pt"):
        with pytest.raises(CorruptError, match=f"{name}: torch cannot read it"):
            TorchSaveSource(tmp_path / name)
    with pytest.raises(NotFoundError, match="no such file"):
        TorchSaveSource(tmp_path / "none.pt")
    with pytest.raises(CkptError, match="copy it first"):
        TorchSaveSource("s3://bucket/a.pt")


def test_a_file_that_is_there_is_not_overwritten(saved: Path) -> None:
    before = saved.read_bytes()
    sink = TorchSaveSink(saved)
    with pytest.raises(StoreError, match="not overwritten"):
        transfer(ArraySource(sample_arrays()), sink)
    sink.close()
    assert saved.read_bytes() == before


def test_closing_without_finish_leaves_nothing(tmp_path: Path) -> None:
    source, sink = ArraySource(sample_arrays()), TorchSaveSink(tmp_path / "a.pt")
    sink.begin(source.specs, aliases={}, values={}, step=None)
    sink.close()
    assert list(tmp_path.iterdir()) == []
