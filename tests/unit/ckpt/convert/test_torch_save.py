"""torch.save files: read without running their code, and written so that others can do the same."""

from __future__ import annotations

import os
import zipfile
from collections import Counter, OrderedDict, deque
from datetime import date
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


def hostile_tree() -> dict[str, Any]:
    """Return a small object that is 2**60 entries for one who walks it as a tree."""
    tree: Any = [torch.ones(1)]
    for _ in range(60):
        tree = [tree, tree]
    return {"tree": tree}


def cycle() -> dict[str, Any]:
    tree: dict[str, Any] = {"w": torch.ones(1)}
    tree["me"] = [tree]
    return tree


def deep() -> dict[str, Any]:
    tree: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(100):
        tree = {"k": tree}
    return tree


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"w": torch.zeros(1).expand(1 << 42)}, r"with w \[4398046511104\] .* views of one memory"),
        ({"w": torch.zeros(1).expand(1 << 30, 4096)}, "views of one memory"),
        (hostile_tree(), "more than 10000000 entries"),
        (cycle(), "nested deeper than 64 levels"),
        (deep(), "nested deeper than 64 levels"),
    ],
)
def test_a_small_file_that_claims_to_be_large_is_refused(
    tmp_path: Path, content: object, said: str
) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 1 << 20
    with pytest.raises(StateError, match=said):
        TorchSaveSource(tmp_path / "a.pt")


def test_views_of_one_memory_come_out_as_they_are(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    content = {"wide": torch.ones(1).expand(1000, 3), "a": base[:4], "b": base[2:]}
    torch.save(content, tmp_path / "a.pt")
    found = read_all(TorchSaveSource(tmp_path / "a.pt"))
    assert found == {name: raw(tensor) for name, tensor in content.items()}


def test_an_archive_with_compressed_parts_is_refused(saved: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as new:
        for name in old.namelist():
            kind = zipfile.ZIP_DEFLATED if name.endswith("data.pkl") else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), compress_type=kind)
    with pytest.raises(CorruptError, match=r"data\.pkl' is compressed, which torch.save never"):
        TorchSaveSource(tmp_path / "bomb.pt")


def test_a_pipe_does_not_stop_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(CorruptError, match="not a regular file"):
        TorchSaveSource(tmp_path / "a.pt")


def test_files_that_torch_cannot_read_are_damaged(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(saved.read_bytes()[:500])
    (tmp_path / "junk.pt").write_bytes(b"junk" * 100)
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("cut.pt", "junk.pt", "old.pt"):
        with pytest.raises(CorruptError, match=f"{name}: torch cannot read it"):
            TorchSaveSource(tmp_path / name)
    with pytest.raises(NotFoundError, match="not there"):
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


def test_a_view_and_its_lazy_negation_are_two_tensors(tmp_path: Path) -> None:
    both = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    given = {"a": both.imag, "b": both.conj().imag, "e": both.imag}
    torch.save(given, tmp_path / "x.pt")
    source = TorchSaveSource(tmp_path / "x.pt")
    assert source.aliases == {"e": "a"}
    sink = TorchSaveSink(tmp_path / "y.pt")
    transfer(source, sink)
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_values_of_standard_types_load_with_weights_only(tmp_path: Path) -> None:
    admitted = {"n": Counter("ab"), "o": OrderedDict(b=1, a=2), "s": {1}, "z": 1j}
    admitted |= {"t": torch.Size([2]), "d": torch.float16, "v": torch.device("cpu")}
    others = {"day": date(2024, 2, 29), "last": deque([1], 2)}
    values = {name: plain.encode(value, name) for name, value in (admitted | others).items()}
    transfer(ArraySource({}, values=values), TorchSaveSink(tmp_path / "y.pt"))
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert {name: found[name] for name in admitted} == admitted
    assert found["day"] == {"$python": ["date", "2024-02-29"]}
    assert found["last"] == {"$python": ["deque", [[1], 2]]}
