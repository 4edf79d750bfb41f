"""The interface between formats: dividing, selecting, transferring."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays
from doubles.interchange import ArraySink, ArraySource

from holdfast.ckpt.convert.interchange import TransferBudget, choose, cut, transfer
from holdfast.ckpt.errors import ArgumentError, CorruptError, MismatchError, StateError
from holdfast.ckpt.geometry.layout import Box


def test_a_tensor_that_fits_is_one_piece() -> None:
    box = Box(offset=(1, 2), shape=(3, 4))
    assert list(cut(box, itemsize=4, most_bytes=48)) == [box]
    assert list(cut(Box(offset=(), shape=()), itemsize=4, most_bytes=1)) == [
        Box(offset=(), shape=())
    ]


def test_a_tensor_is_cut_along_its_rows() -> None:
    found = list(cut(Box(offset=(1, 2), shape=(5, 4)), itemsize=4, most_bytes=40))
    assert found == [
        Box(offset=(1, 2), shape=(2, 4)),
        Box(offset=(3, 2), shape=(2, 4)),
        Box(offset=(5, 2), shape=(1, 4)),
    ]


def test_a_row_that_does_not_fit_is_cut_too() -> None:
    found = list(cut(Box(offset=(0, 0), shape=(2, 5)), itemsize=1, most_bytes=3))
    assert [(box.offset, box.shape) for box in found] == [
        ((0, 0), (1, 3)),
        ((0, 3), (1, 2)),
        ((1, 0), (1, 3)),
        ((1, 3), (1, 2)),
    ]


def test_an_empty_tensor_has_no_pieces() -> None:
    assert list(cut(Box(offset=(0, 0), shape=(3, 0)), itemsize=4, most_bytes=8)) == []


@pytest.mark.parametrize("memory_mib", [8, 64, 200, 2048, 1 << 20])
def test_what_is_read_ahead_is_at_most_half_of_the_memory(memory_mib: int) -> None:
    budget = TransferBudget.of(memory_mib << 20)
    assert 0 < budget.piece_bytes <= budget.ahead_bytes <= memory_mib << 19


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(StateError, match="at least 8 MiB"):
        TransferBudget.of(1 << 20)


def test_every_element_arrives_once_in_pieces_that_fit() -> None:
    arrays = sample_arrays()
    arrays["large"] = (np.arange(3 << 20, dtype="<i4").reshape(3, -1), "int32")
    source = ArraySource(arrays, aliases={"tied": "model.bias"}, values={"lr": 0.5})
    sink, heard = ArraySink(), list[int]()
    done = transfer(source, sink, memory_bytes=8 << 20, progress=heard.append, step=4)
    for fqn, (array, _) in arrays.items():
        assert sink.raw[fqn].tobytes() == array.tobytes()
        assert (sink.written[fqn] == 1).all()
    assert sink.largest <= TransferBudget.of(8 << 20).piece_bytes
    assert (sink.aliases, sink.values, sink.step) == ({"tied": "model.bias"}, {"lr": 0.5}, 4)
    assert sink.published
    assert done.bytes == sum(heard) == sum(array.nbytes for array, _ in arrays.values())
    assert (done.tensors, done.aliases, done.values) == (len(arrays), 1, 1)


def test_globs_select_tensors_and_values() -> None:
    source = ArraySource(sample_arrays(), values={"model.a": 1, "lr": 2})
    sink = ArraySink()
    transfer(source, sink, select=["model.?i*", "optimizer.*"])
    assert set(sink.raw) == {"model.bias", "model.tiny", "optimizer.step"}
    assert sink.values == {}


def test_a_selected_tied_name_brings_the_tensor_of_the_one_that_is_not() -> None:
    arrays = {"embed": (np.arange(4, dtype="<i8"), "int64"), "x": (np.ones(1), "float64")}
    source = ArraySource(arrays, aliases={"head.a": "embed", "head.b": "embed"})
    chosen = choose(source, ["head.*"])
    assert (list(chosen.specs), chosen.aliases) == (["head.a"], {"head.b": "head.a"})
    sink = ArraySink()
    transfer(source, sink, select=["head.*"])
    assert sink.raw["head.a"].tobytes() == arrays["embed"][0].tobytes()


def test_selecting_nothing_names_what_there_is() -> None:
    with pytest.raises(MismatchError, match=r"nope selects none of its 8 tensors.*model\.weight"):
        transfer(ArraySource(sample_arrays()), ArraySink(), select=["nope"])


def test_a_source_that_gives_other_bytes_than_asked_is_caught() -> None:
    source = ArraySource(sample_arrays())
    source.read = lambda fqn, box: memoryview(b"abc")  # type: ignore[method-assign]
    sink = ArraySink()
    with pytest.raises(CorruptError, match="3 bytes came"):
        transfer(source, sink)
    assert not sink.published


def test_several_threads_read_where_the_source_allows_it() -> None:
    together = threading.Barrier(2, timeout=30)

    class Parallel(ArraySource):
        parallel = True

        def read(self, fqn: str, box: Box) -> memoryview:
            together.wait()
            return memoryview(part_bytes[fqn])

    arrays = {name: (np.full(4, n, "<i4"), "int32") for n, name in enumerate("abcd")}
    part_bytes = {name: array.tobytes() for name, (array, _) in arrays.items()}
    sink = ArraySink()
    transfer(Parallel(arrays), sink, memory_bytes=128 << 20)
    assert {name: raw.tobytes() for name, raw in sink.raw.items()} == part_bytes


def test_no_more_is_read_ahead_than_the_budget_allows() -> None:
    arrays = {str(n): (np.zeros(1 << 18, "|u1"), "uint8") for n in range(64)}
    budget = TransferBudget.of(8 << 20)
    read = written = most = 0
    lock = threading.Lock()

    class Counting(ArraySource):
        def read(self, fqn: str, box: Box) -> memoryview:
            nonlocal read, most
            with lock:
                read += box.size
                most = max(most, read - written)
            return super().read(fqn, box)

    class Slow(ArraySink):
        def write(self, fqn: str, box: Box, data: memoryview) -> None:
            nonlocal written
            time.sleep(0.001)
            with lock:
                written += data.nbytes

    transfer(Counting(arrays), Slow(), memory_bytes=8 << 20)
    assert written == 64 << 18
    assert most <= budget.ahead_bytes + 2 * budget.piece_bytes


def test_an_error_of_the_sink_ends_the_reading() -> None:
    class Full(ArraySink):
        def write(self, fqn: str, box: Box, data: memoryview) -> None:
            raise OSError("full")

    before = threading.active_count()
    with pytest.raises(OSError, match="full"):
        transfer(ArraySource(sample_arrays()), Full())
    assert threading.active_count() == before


def test_one_pattern_needs_no_list() -> None:
    sink = ArraySink()
    transfer(ArraySource(sample_arrays()), sink, select="optimizer.*")
    assert sink.specs
    assert all(name.startswith("optimizer.") for name in sink.specs)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"select": 3}, r"transfer\(select=3\): give a glob pattern"),
        ({"select": ["a", 3]}, r"transfer\(select=\['a', 3\]\)"),
        ({"memory_bytes": "2GiB"}, r"memory_bytes='2GiB'\): give the bytes as a whole number"),
        ({"memory_bytes": True}, "memory_bytes=True"),
        ({"step": "last"}, r"step='last'\): give the number of a step, or None"),
        ({"step": -1}, "step=-1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(argument: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        transfer(ArraySource(sample_arrays()), ArraySink(), **argument)
