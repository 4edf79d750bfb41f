"""safetensors files: the library's are read, ours are read by the library, hostile ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.checkpoints import sample_arrays
from doubles.interchange import ArraySource, read_all
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from holdfast.ckpt.convert.interchange import Transferred, transfer
from holdfast.ckpt.convert.safetensors import INDEX, SafetensorsSink, SafetensorsSource
from holdfast.ckpt.convert.safetensors_header import NAME_OF, TORCH_OF, build_header, parse_header
from holdfast.ckpt.errors import CkptError, CorruptError, MismatchError, NotFoundError, StoreError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state.torch_dtypes import BY_NAME


def tensors() -> dict[str, torch.Tensor]:
    """Return a tensor of every element type both sides know, a scalar and an empty one."""
    torch.manual_seed(0)
    found = {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3)}
    for name in NAME_OF:
        dtype = BY_NAME[name]
        raw = torch.randint(0, 2, (3, 4, 5 * dtype.itemsize), dtype=torch.uint8)
        found[f"t.{name}"] = raw.view(dtype)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(source: Any, target: Path, **options: Any) -> Transferred:
    sink = SafetensorsSink(target, **options)
    try:
        return transfer(source, sink, memory_bytes=8 << 20)
    finally:
        sink.close()


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    return tmp_path / "theirs.safetensors"


def test_what_the_library_writes_is_read(theirs: Path) -> None:
    source = SafetensorsSource(theirs)
    found = read_all(source)
    source.close()
    for name, tensor in tensors().items():
        spec = source.specs[name]
        assert (spec.dtype, spec.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert found[name] == raw(tensor)


def test_what_is_written_the_library_reads(theirs: Path, tmp_path: Path) -> None:
    write(SafetensorsSource(theirs), tmp_path / "ours.safetensors")
    unread = {"t.float8_e8m0fnu", "t.float4_e2m1fn_x2"}
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors())
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors().items():
            if name not in unread:  # the library writes these, but has no torch type to read them
                assert raw(file.get_tensor(name)) == raw(tensor)
    assert read_all(SafetensorsSource(tmp_path / "ours.safetensors")) == read_all(
        SafetensorsSource(theirs)
    )


def test_every_element_is_aligned(theirs: Path, tmp_path: Path) -> None:
    write(SafetensorsSource(theirs), tmp_path / "ours.safetensors")
    data = (tmp_path / "ours.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            width = BY_NAME[TORCH_OF[entry["dtype"]]].itemsize
            assert start == end or (8 + length + start) % width == 0


@pytest.mark.parametrize(
    "box",
    [
        Box(offset=(0, 0, 0), shape=(3, 4, 5)),
        Box(offset=(1, 0, 0), shape=(2, 4, 5)),
        Box(offset=(1, 1, 2), shape=(2, 2, 3)),
        Box(offset=(2, 3, 4), shape=(1, 1, 1)),
        Box(offset=(0, 0, 4), shape=(3, 4, 1)),
        Box(offset=(0, 0, 4), shape=(3, 0, 1)),
    ],
)
@pytest.mark.parametrize("slab_bytes", [1, 60, 1 << 20])
def test_any_box_is_read(
    theirs: Path, box: Box, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.ckpt.convert.box_files._SLAB_BYTES", slab_bytes)
    tensor = tensors()["t.float32"]
    index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    assert bytes(SafetensorsSource(theirs).read("t.float32", box)) == raw(tensor[index])


def test_large_models_become_several_files_with_an_index(theirs: Path, tmp_path: Path) -> None:
    done = write(SafetensorsSource(theirs), tmp_path / "dir", file_bytes=500)
    index = json.loads((tmp_path / "dir" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "dir").glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == done.bytes == sum(map(len, map(raw, all_of(files))))
    for name in ("t.float32", "scalar", "empty"):  # as transformers does
        assert raw(load_file(tmp_path / "dir" / index["weight_map"][name])[name]) == raw(
            tensors()[name]
        )
    assert read_all(SafetensorsSource(tmp_path / "dir")) == read_all(SafetensorsSource(theirs))


def all_of(_: list[str]) -> list[torch.Tensor]:
    return list(tensors().values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_names_in_a_file_of_save_model_are_known(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "m.safetensors"))
    source = SafetensorsSource(tmp_path / "m.safetensors")
    assert len(source.specs) == 1
    assert source.aliases.keys() | source.specs.keys() == model.state_dict().keys()
    write(source, tmp_path / "again.safetensors")
    other = Tied()
    load_model(other, str(tmp_path / "again.safetensors"))
    assert torch.equal(other.head.weight, model.head.weight)
    again = SafetensorsSource(tmp_path / "again.safetensors")
    assert again.aliases == source.aliases


def test_the_name_format_means_the_format(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert SafetensorsSource(tmp_path / "a.safetensors").aliases == {}


def test_names_with_another_meaning_in_the_format_are_refused(tmp_path: Path) -> None:
    array = (np.ones(2, "<f4"), "float32")
    tied = ArraySource({"w": array}, aliases={"format": "w"})
    with pytest.raises(MismatchError, match=r"the name format, tied to w.*--duplicate-tied"):
        write(tied, tmp_path / "a.safetensors")
    write(tied, tmp_path / "a.safetensors", duplicate_tied=True)
    assert set(load_file(tmp_path / "a.safetensors")) == {"w", "format"}
    with pytest.raises(MismatchError, match="no tensor can be called __metadata__"):
        write(ArraySource({"__metadata__": array}), tmp_path / "b.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_ties_can_be_given(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(2)}, tmp_path / "m.safetensors")
    source = SafetensorsSource(tmp_path / "m.safetensors", ties={"head": "embed"})
    assert source.aliases == {"head": "embed"}
    with pytest.raises(MismatchError, match="no tensor body that head"):
        SafetensorsSource(tmp_path / "m.safetensors", ties={"head": "body"})


def test_tied_tensors_can_be_stored_under_every_name(tmp_path: Path) -> None:
    source = ArraySource(sample_arrays(), aliases={"head": "model.weight"})
    write(source, tmp_path / "m.safetensors", duplicate_tied=True)
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["head"], found["model.weight"])
    assert SafetensorsSource(tmp_path / "m.safetensors").aliases == {}


def test_an_index_that_lists_what_no_file_has_needs_a_tie(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"embed": "a.safetensors", "head": "a.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"head \(1 in all\).*--tie"):
        SafetensorsSource(tmp_path)
    assert SafetensorsSource(tmp_path, ties={"head": "embed"}).aliases == {"head": "embed"}


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", ".hidden", "", "x/y"])
def test_an_index_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CorruptError, match="refused"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"x": 3}}', '{"a": 1}', "\xff"])
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptError, match="not an index"):
        SafetensorsSource(tmp_path)


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    places = {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CorruptError, match=r"is in .*a\.safetensors too"):
        SafetensorsSource(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CorruptError, match="missing, the index lists it"):
        SafetensorsSource(tmp_path)


def test_a_directory_without_one_file_or_an_index_is_not_guessed_at(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"0 .* files and no"):
        SafetensorsSource(tmp_path)
    for name in "ab":
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(NotFoundError, match=r"2 .* files and no"):
        SafetensorsSource(tmp_path)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    write(ArraySource(sample_arrays()), target)
    before = target.read_bytes()
    for place in (target, tmp_path):
        with pytest.raises(StoreError, match="not overwritten"):
            write(ArraySource(sample_arrays(1)), place)
    assert target.read_bytes() == before


def test_the_same_content_written_again_is_refused_and_stays(tmp_path: Path) -> None:
    for target in (tmp_path / "m.safetensors", tmp_path / "dir"):
        write(ArraySource(sample_arrays()), target, content="c", file_bytes=100)
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(StoreError, match="not overwritten"):
            write(ArraySource(sample_arrays()), target, content="c", file_bytes=100)
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_files_of_a_killed_attempt_are_not_written_again(tmp_path: Path) -> None:
    write(ArraySource(sample_arrays()), tmp_path / "whole", content="c", file_bytes=100)
    write(ArraySource(sample_arrays()), tmp_path / "again", content="c", file_bytes=100)
    *_, last = sorted((tmp_path / "again").glob("*.safetensors"))
    last.unlink()
    (tmp_path / "again" / INDEX).unlink()
    done = write(ArraySource(sample_arrays()), tmp_path / "again", content="c", file_bytes=100)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == whole
    header = int.from_bytes(last.read_bytes()[:8], "little") + 8
    assert done.bytes == last.stat().st_size - header


def test_files_of_another_content_are_refused(tmp_path: Path) -> None:
    write(ArraySource(sample_arrays()), tmp_path, content="c", file_bytes=100)
    (tmp_path / INDEX).unlink()
    with pytest.raises(StoreError, match="not overwritten"):
        write(ArraySource(sample_arrays()), tmp_path, content="d", file_bytes=100)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_closing_without_finish_leaves_nothing(tmp_path: Path) -> None:
    source = ArraySource(sample_arrays())
    sink = SafetensorsSink(tmp_path, file_bytes=100)
    sink.begin(source.specs, aliases={}, values={}, step=None)
    for (fqn, box), _ in zip(sink.pieces(1 << 20), range(5), strict=False):
        sink.write(fqn, box, memoryview(bytes(source.read(fqn, box))))
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_an_element_type_the_format_lacks_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(MismatchError, match="no complex128"):
        build_header([TensorSpec(fqn="z", dtype="complex128", shape=(2,))], {})


def header(fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return len(body).to_bytes(8, "little") + body


def entry(shape: list[int], start: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "an empty file": (b"", "announce"),
    "a cut length": (b"\x10\0\0", "announce"),
    "a huge header": ((1 << 60).to_bytes(8, "little"), "announce"),
    "a header beyond the file": ((900).to_bytes(8, "little") + b"{}", "cut off"),
    "no JSON": (header({})[:8] + b"xx", "not a safetensors header"),
    "a list": (header([]), "not a safetensors header"),
    "a deep nesting": (
        (200_002).to_bytes(8, "little") + b"{" + b'"a":' + b"[" * 199_997,
        "not a safetensors header",
    ),
    "a negative extent": (header({"x": entry([-2, -4], 0, 8)}) + b"8bytes!!", "not a safetensors"),
    "a huge shape": (header({"x": entry([1 << 62, 1 << 62], 0, 8)}) + b"8bytes!!", "has 2126"),
    "bytes beyond the file": (header({"x": entry([99], 0, 99)}) + b"8bytes!!", "file has 8"),
    "bytes nobody owns": (header({"x": entry([4], 0, 4)}) + b"8bytes!!", "describes 4 bytes"),
    "a gap": (
        header({"x": entry([2], 0, 2), "y": entry([4], 4, 8)}) + b"8bytes!!",
        "y starts at 4 and leaves a gap",
    ),
    "an overlap": (
        header({"x": entry([5], 0, 5), "y": entry([4], 4, 8)}) + b"8bytes!!",
        "y starts at 4 and overlaps",
    ),
    "a reversed range": (header({"x": entry([8], 8, 0)}) + b"8bytes!!", "the header gives"),
    "another size than its shape": (header({"x": entry([3], 0, 8)}) + b"8bytes!!", "has 3 bytes"),
    "an unknown type": (header({"x": entry([8], 0, 8, "Q8")}) + b"8bytes!!", "type Q8 has no"),
    "a float": (header({"x": entry([8], 0, 8) | {"shape": [8.5]}}), "not a safetensors header"),
    "metadata that is not text": (header({"__metadata__": {"a": 1}}), "not a safetensors header"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_name(tmp_path: Path, case: str) -> None:
    data, said = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(CkptError, match=said) as caught:
        SafetensorsSource(path)
    assert str(path) in str(caught.value)


def test_a_name_that_is_there_twice_leaves_a_gap() -> None:
    one, two = json.dumps(entry([4], 0, 4)), json.dumps(entry([4], 4, 8))
    raw_header = f'{{"x": {one}, "x": {two}}}'.encode()
    with pytest.raises(CorruptError, match="leaves a gap"):
        parse_header(raw_header, file_bytes=8 + len(raw_header) + 8, origin="f")
