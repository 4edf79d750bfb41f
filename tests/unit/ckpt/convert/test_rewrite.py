"""`holdfast reshard`: a checkpoint rewritten as other ranks would have saved it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doubles.checkpoints import sample_arrays, write_checkpoint
from doubles.interchange import ArraySource, read_all

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.convert.checkpoint import CheckpointSink, CheckpointSource, Identity
from holdfast.ckpt.convert.interchange import Transferred, transfer
from holdfast.ckpt.convert.rewrite import reshard
from holdfast.ckpt.convert.target_layout import SplitRule, TargetLayout
from holdfast.ckpt.errors import StateError, StoreError
from holdfast.ckpt.format.manifest import MANIFEST
from holdfast.ckpt.store.places import open_store
from holdfast.tools.cli import main

STEP = "step-000000000007"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(
        tmp_path / "root",
        sample_arrays(),
        world_size=2,
        step=7,
        values={"lr": 0.25},
        aliases={"model.head": "model.weight"},
    )
    return tmp_path / "root"


def check(target: Path, *, step: int = 7) -> None:
    """Assert that every tensor and value is there, and every byte sound."""
    assert list(faults(open_store(target), step, deep=True)) == []
    with StoreSource(target, step) as source:
        found = CheckpointSource(source)
        arrays = {fqn: array.tobytes() for fqn, (array, _) in sample_arrays().items()}
        assert read_all(found) == arrays | {"model.head": arrays["model.weight"]}
        assert found.values == {"lr": 0.25}


def again(root: Path, target: Path, **mesh: int) -> Transferred:
    with StoreSource(root, 7) as source:
        return reshard(source, target, layout=TargetLayout(mesh=mesh))


def files(target: Path) -> dict[str, tuple[int, int]]:
    """Return the packs and indexes with what tells whether they were written again."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for part in ("data", "index")
        for path in (target / STEP / part).iterdir()
    }


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 13])
def test_reshard_writes_what_dp_ranks_would_have(
    root: Path, tmp_path: Path, dp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"dp{dp}"
    assert main(["reshard", str(root), str(target), "--mesh", f"dp={dp}"]) == 0
    assert str(target / STEP) in capsys.readouterr().out
    check(target)
    with StoreSource(target, 7) as source:
        manifest = source.manifest
        assert (manifest.mesh, manifest.world_size, manifest.merged) == ({"dp": dp}, dp, None)
        assert (manifest.run, manifest.generation) == ("test", 1)
        full = -(-10 // dp)
        first = source.indexes()[0].tensors["model.weight"].chunks
        assert [chunk.box.shape for chunk in first] == [(full, 7)]
        ranks = [index.rank_values for index in source.indexes()]
        assert ranks == [{"rank": rank} if rank < 2 else {} for rank in range(dp)]


def test_reshard_for_tensor_parallelism(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reshard", str(root), str(tmp_path / "t"), "--mesh", "dp=2,tp=2", "--json"]
    assert main([*words, "--shard", "*.weight=1", "--shard", "cursor*=tp:-1"]) == 0
    output = json.loads(capsys.readouterr().out)
    nbytes = sum(array.nbytes for array, _ in sample_arrays().values())
    assert (output["mesh"], output["ranks"]) == ({"dp": 2, "tp": 2}, 4)
    assert (output["bytes"], output["bytes_found_complete"]) == (nbytes, 0)
    assert output["path"] == str(tmp_path / "t" / STEP)
    check(tmp_path / "t")
    with StoreSource(tmp_path / "t", 7) as source:
        boxes = [i.tensors["model.weight"].chunks[0].box for i in source.indexes()]
    assert [(box.offset, box.shape) for box in boxes] == [
        ((0, 0), (5, 4)),
        ((0, 4), (5, 3)),
        ((5, 0), (5, 4)),
        ((5, 4), (5, 3)),
    ]


def test_resharding_again_and_again_comes_back(root: Path, tmp_path: Path) -> None:
    with StoreSource(root, 7) as source:
        layout = TargetLayout(
            mesh={"dp": 2, "tp": 3}, rules=(SplitRule(glob="model.weight", axis="tp", dim=0),)
        )
        reshard(source, tmp_path / "a", layout=layout)
    again(tmp_path / "a", tmp_path / "b", dp=5)
    again(tmp_path / "b", tmp_path / "c", dp=2)
    check(tmp_path / "c")
    with StoreSource(root, 7) as first, StoreSource(tmp_path / "c", 7) as last:
        assert [i.tensors.keys() for i in first.indexes()[:1]] == [
            i.tensors.keys() for i in last.indexes()[:1]
        ]


def test_an_attempt_that_did_not_commit_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    again(root, target, dp=3)
    (target / STEP / MANIFEST).unlink()
    before = files(target)
    lost = sorted(name for name in before if name.startswith("00001-"))
    for name in lost:
        (target / STEP / ("data" if name.endswith("pack") else "index") / name).unlink()
    done = again(root, target, dp=3)
    check(target)
    after = files(target)
    assert before.keys() == after.keys()
    assert sorted(name for name in after if after[name] != before[name]) == lost
    assert 0 < done.bytes < sum(array.nbytes for array, _ in sample_arrays().values())


@pytest.mark.parametrize(
    ("part", "damage"),
    [(p, d) for p in ("data", "index") for d in ("missing", "cut", "changed")],
)
def test_files_that_are_not_as_they_were_written_are_written_again(
    root: Path, tmp_path: Path, part: str, damage: str
) -> None:
    target = tmp_path / "t"
    again(root, target, dp=2)
    (target / STEP / MANIFEST).unlink()
    path = sorted((target / STEP / part).iterdir())[0]
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    again(root, target, dp=2)
    check(target)


def test_another_layout_or_state_does_not_take_what_was_left(root: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "t", tmp_path / "other"
    again(root, target, dp=3)
    (target / STEP / MANIFEST).unlink()
    before = files(target)
    again(root, target, dp=2)
    check(target)
    with StoreSource(target, 7) as source:
        used = {Path(record.path).name for record in source.manifest.files()}
    assert not before.keys() & used
    write_checkpoint(other, sample_arrays(1), world_size=2, step=7)
    again(other, tmp_path / "u", dp=2)
    assert not files(target).keys() & files(tmp_path / "u").keys()


def test_a_step_that_is_there_stays(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "t"
    again(root, target, dp=3)
    before = files(target)
    assert main(["reshard", str(root), str(target), "--mesh", "dp=2"]) == 1
    assert "not overwritten" in capsys.readouterr().err
    assert files(target) == before


def test_reshard_refuses_its_own_source(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(root), str(root), "--mesh", "dp=2"]) == 1
    assert "the same" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["dp=0", "dp=x", "dp=99999", "2", "dp=2,dp=2", "dp=999,tp=999"])
def test_a_wrong_mesh_is_a_usage_error(
    root: Path, tmp_path: Path, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reshard", str(root), str(tmp_path / "x"), "--mesh", mesh])
    assert ended.value.code == 2
    assert mesh in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "shard", "said"),
    [
        ("dp=2", "*=0", "say which one splits, as in *=dp:0"),
        ("dp=2,tp=2,ep=2", "*=0", "say which one splits, as in *=tp:0"),
        ("dp=2", "*=tp:0", "the mesh has the axes dp"),
        ("dp=2", "weight", "not of the form GLOB=DIM"),
    ],
)
def test_a_wrong_rule_is_a_usage_error(
    root: Path, tmp_path: Path, mesh: str, shard: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reshard", str(root), str(tmp_path / "x"), "--mesh", mesh, "--shard", shard]
    try:
        assert main(words) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_rule_that_fits_nothing_is_an_error(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reshard", str(root), str(tmp_path / "x"), "--mesh", "dp=1,tp=2", "--shard", "wq=0"]
    assert main(words) == 1
    assert "no tensor is called wq" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_tensors_of_any_source_become_a_checkpoint(tmp_path: Path) -> None:
    source = ArraySource(
        sample_arrays(), aliases={"model.head": "model.weight"}, values={"lr": 0.25}
    )
    sink = CheckpointSink(tmp_path, layout=TargetLayout(mesh={"dp": 3}))
    transfer(source, sink, step=7, memory_bytes=8 << 20)
    sink.close()
    check(tmp_path)


def test_closing_without_finish_leaves_no_step_and_no_files(tmp_path: Path) -> None:
    source, sink = ArraySource(sample_arrays()), CheckpointSink(tmp_path / "t")
    sink.begin(source.specs, aliases={}, values={}, step=1)
    pieces = iter(sink.pieces())
    for _ in range(3):
        fqn, box = next(pieces)
        sink.write(fqn, box, memoryview(bytes(source.read(fqn, box))))
    sink.close()
    assert committed_steps(tmp_path / "t") == []
    assert [path for path in (tmp_path / "t").rglob("*") if path.is_file()] == []


def test_pieces_out_of_turn_are_refused(tmp_path: Path) -> None:
    source, sink = ArraySource(sample_arrays()), CheckpointSink(tmp_path)
    sink.begin(source.specs, aliases={}, values={}, step=1)
    (fqn, box), *_ = sink.pieces()
    with pytest.raises(StateError, match="not the next piece"):
        sink.write("model.bias", box, memoryview(b""))
    sink.close()
    fresh = CheckpointSink(tmp_path)
    with pytest.raises(StateError, match="in its order"):
        fresh.write(fqn, box, memoryview(b""))


def test_one_identity_is_one_content(root: Path, tmp_path: Path) -> None:
    with StoreSource(root, 7) as source:
        mine = CheckpointSource(source).identity
    write_checkpoint(tmp_path / "b", sample_arrays(), world_size=2, step=7, values={"lr": 0.5})
    with StoreSource(tmp_path / "b", 7) as source:
        assert CheckpointSource(source).identity.content != mine.content
    assert (mine.run, mine.generation, mine.rank_values[1]) == ("test", 1, {"rank": 1})
    assert Identity().content is None


def test_a_disk_that_refuses_is_an_error_and_leaves_nothing_visible(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("full")

    monkeypatch.setattr("holdfast.ckpt.convert.checkpoint.write_parts", full)
    with pytest.raises(StoreError, match="full"):
        again(root, tmp_path / "t", dp=2)
    assert committed_steps(tmp_path / "t") == []


def test_compression_stays_unless_another_is_asked_for(tmp_path: Path) -> None:
    ckpt.save(
        tmp_path / "s",
        {"m": {"a": torch.zeros(64, 4), "b": torch.ones(9)}},
        step=1,
        compression={"*.a": "zstd:5"},
    )
    for target, compression, wanted in (
        ("same", None, {"m.a": "zstd:5", "m.b": "None"}),
        ("none", {}, {"m.a": "None", "m.b": "None"}),
        ("all", {"*": "blosc-lz4"}, {"m.a": "blosc-lz4:5", "m.b": "blosc-lz4:5"}),
    ):
        with StoreSource(tmp_path / "s", 1) as source:
            reshard(
                source,
                tmp_path / target,
                layout=TargetLayout(mesh={"dp": 2}),
                compression=compression,
            )
        with StoreSource(tmp_path / target, 1) as source:
            found = {fqn: str(tensor.codec) for fqn, tensor in source.manifest.tensors.items()}
        assert found == wanted
        assert not ckpt.open(tmp_path / target)["m.a"][...].any()
