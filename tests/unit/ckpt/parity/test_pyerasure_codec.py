"""The codec over pyerasure: against a plain implementation of its API, and the real package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import combinations
from types import ModuleType

import numpy as np
import pytest
from galois import TABLE

from holdfast.ckpt.parity.erasure import codec_named
from holdfast.ckpt.parity.pyerasure_codec import CODEC, PyerasureCodec

LENGTH = 40
INVERSE = [0, *(int(np.flatnonzero(TABLE[value] == 1)[0]) for value in range(1, 256))]


def times(data: bytes, factor: int) -> bytearray:
    return bytearray(TABLE[factor][np.frombuffer(data, dtype=np.uint8)].tobytes())


def add(into: bytearray, data: bytes) -> None:
    for at, value in enumerate(data):
        into[at] ^= value


class Field:
    """Stands for ``Binary8``: GF(256) modulo x^8 + x^4 + x^3 + x^2 + 1."""


class Generator:
    """Stands for ``RSCauchy``: a Cauchy matrix with ``x = 255 - row`` and ``y = column``."""

    def __init__(self, field: Field, symbols: int) -> None:
        assert isinstance(field, Field)
        self._symbols = symbols

    def generate_specific(self, index: int) -> bytes:
        if index >= 255 - self._symbols:
            raise ValueError("index out of range")
        return bytes(INVERSE[(255 - index) ^ column] for column in range(self._symbols))


class Encoder:
    """Stands for the block encoder."""

    def __init__(self, field: Field, symbols: int, symbol_bytes: int) -> None:
        assert isinstance(field, Field)
        self._shape, self._data = (symbols, symbol_bytes), bytearray()

    def set_symbols(self, data: bytearray) -> None:
        assert isinstance(data, bytearray)
        assert len(data) == self._shape[0] * self._shape[1]
        self._data = data

    def encode_symbol(self, coefficients: bytes) -> bytearray:
        symbols, nbytes = self._shape
        assert len(coefficients) == symbols
        encoded = bytearray(nbytes)
        for number, factor in enumerate(coefficients):
            add(encoded, times(self._data[number * nbytes : (number + 1) * nbytes], factor))
        return encoded


class Decoder:
    """Stands for the block decoder, which works in the buffers it is given."""

    def __init__(self, field: Field, symbols: int, symbol_bytes: int) -> None:
        assert isinstance(field, Field)
        self._shape = (symbols, symbol_bytes)
        self._pivots: dict[int, tuple[bytearray, bytearray]] = {}

    def decode_systematic_symbol(self, symbol: bytearray, index: int) -> None:
        self.decode_symbol(symbol, bytearray(int(i == index) for i in range(self._shape[0])))

    def decode_symbol(self, symbol: bytearray, coefficients: bytearray) -> None:
        assert isinstance(symbol, bytearray)
        assert isinstance(coefficients, bytearray)
        for pivot, (row, data) in self._pivots.items():
            factor = coefficients[pivot]
            add(symbol, times(data, factor))
            add(coefficients, times(row, factor))
        if (pivot := next((at for at, value in enumerate(coefficients) if value), -1)) < 0:
            return
        scale = INVERSE[coefficients[pivot]]
        symbol[:], coefficients[:] = times(symbol, scale), times(coefficients, scale)
        for row, data in self._pivots.values():
            factor = row[pivot]
            add(data, times(symbol, factor))
            add(row, times(coefficients, factor))
        self._pivots[pivot] = (coefficients, symbol)

    def is_complete(self) -> bool:
        return len(self._pivots) == self._shape[0]

    def block_data(self) -> bytearray:
        empty = (bytearray(), bytearray(self._shape[1]))
        parts = (self._pivots.get(number, empty)[1] for number in range(self._shape[0]))
        return bytearray().join(parts)


def stand_ins() -> dict[str, ModuleType]:
    modules = {
        name: ModuleType(name)
        for name in (
            "pyerasure",
            "pyerasure.finite_field",
            "pyerasure.block",
            "pyerasure.block.generator",
        )
    }
    modules["pyerasure.finite_field"].Binary8 = Field  # type: ignore[attr-defined]
    modules["pyerasure.block"].Encoder = Encoder  # type: ignore[attr-defined]
    modules["pyerasure.block"].Decoder = Decoder  # type: ignore[attr-defined]
    modules["pyerasure.block.generator"].RSCauchy = Generator  # type: ignore[attr-defined]
    return modules


@pytest.fixture(params=["plain", "real"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if request.param == "plain":
        for name, module in stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
    elif importlib.util.find_spec("pyerasure") is None:
        pytest.skip("pyerasure is not installed: it is not on PyPI, its maker distributes it")
    yield


@pytest.mark.parametrize(("k", "m"), [(1, 1), (3, 2)])
@pytest.mark.usefixtures("implementation")
def test_any_k_fragments_give_every_column_back(k: int, m: int) -> None:
    codec = PyerasureCodec(k, m)
    rng = np.random.default_rng([k, m])
    data = [rng.bytes(LENGTH - column) for column in range(k)]  # shorter ones end in zeros
    rows = {row: bytearray(b"\xff" * LENGTH) for row in range(m)}
    codec.encode(data, rows)
    fragments = dict(enumerate([*data, *map(bytes, rows.values())]))
    for have in combinations(range(k + m), k):
        for lost in set(range(k)) - set(have):
            into = bytearray(LENGTH)
            codec.decode(lost, {number: fragments[number] for number in have}, into)
            assert into == data[lost] + bytes(lost)


@pytest.mark.usefixtures("implementation")
def test_updates_make_the_same_rows() -> None:
    codec = PyerasureCodec(3, 2)
    data = [bytes(range(column, column + LENGTH)) for column in range(3)]
    rows = {row: bytearray(LENGTH) for row in (0, 1)}
    codec.encode(data, rows)
    for row, made in rows.items():
        updated = bytearray(LENGTH)
        for column in (2, 0, 1, 0, 0):  # twice more takes it out and adds it again
            codec.encode_update(row, column, data[column], updated)
        assert updated == made


@pytest.mark.usefixtures("implementation")
def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="no code for 0 data"):
        PyerasureCodec(0, 1)
    codec = PyerasureCodec(2, 1)
    with pytest.raises(ValueError, match="needs all 2 columns"):
        codec.encode([b"a"], {0: bytearray(1)})
    with pytest.raises(ValueError, match="needs 2 different fragments"):
        codec.decode(0, {1: b"a"}, bytearray(1))
    with pytest.raises(ValueError, match="3 bytes does not fit into 2"):
        codec.decode(0, {1: b"abc", 2: b"ab"}, bytearray(2))
    with pytest.raises(ValueError, match="differ in length"):
        codec.encode_update(0, 0, b"a", bytearray(2))


def test_where_it_is_missing_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in stand_ins():
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    make = codec_named(CODEC)
    with pytest.raises(ImportError, match="not on PyPI: install it from its maker"):
        make(2, 1)
