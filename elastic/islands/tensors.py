"""The sea's weights and momentum on this rank, beside the parameters of the run.

An island's own progress is *weights - parameter*; nothing else is kept of it. A portion is a group
of whole parameters. Its payload is the same bytes on all ranks, whatever their mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.snapshot.touched import Rows
from holdfast.ckpt.state.hashing import whole
from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.kinds.rebuilt import module_of
from holdfast.ckpt.state.local_boxes import (
    Leaf,
    LocalBox,
    empty_like,
    local_boxes_of,
    local_of,
)
from holdfast.ckpt.state.names import clean, join
from holdfast.ckpt.state.tensor_shares import combined, shares_of
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError, NotFiniteError, SeaError
from holdfast.elastic.sea import payload
from holdfast.elastic.sea.outer import Floats, stepped
from holdfast.elastic.sea.portions import portions_of
from holdfast.elastic.sea.records import Parameter
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.tracked.entries import leaves_of

_PIECE_BYTES: Final = 64 << 20
"""Most bytes of all islands' payloads that ranks exchange at once."""

_DIGEST_BYTES: Final = 16

LEAST_BYTES: Final = 1 << 20
LEAST_ROW_BYTES: Final = 256
"""It costs less to read a smaller tensor, or one of shorter rows, than to say that it is as it was.
"""


class Ranks(Protocol):
    """The part of a generation's world that this module needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, value: Json) -> list[Json]:
        """Return every rank's value, in rank order."""
        ...

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up the ranks' tensors, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give all ranks the tensor of rank 0, in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A merge as ranks adopt it: the weights of its works, and the place of the own one (or -1)."""

    portion: int
    weights: Sequence[int]
    whole: int
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaParameter:
    """A trained parameter, and what the sea has of it."""

    name: str
    parameter: torch.Tensor
    weights: Leaf
    momentum: Leaf
    count: int


class SeaTensors:
    """The trained parameters in ``state`` and the sea's weights and momentum of them.

    ``payload`` has room for the payloads of all portions, a row of bytes for each block;
    ``modules`` are the tracked ones. Raises ``ConfigError`` for parameters that an island cannot
    merge.
    """

    def __init__(self, state: Mapping[str, Any], ranks: Ranks, islands: Islands) -> None:
        self._ranks, self._islands = ranks, islands
        self.modules = {
            name: value for name, value in state.items() if isinstance(module_of(value), nn.Module)
        }
        self._all = [_trained(name, parameter) for name, parameter in _parameters(state)]
        self.portions = portions_of([each.count for each in self._all], islands.portions)
        self._sizes = [self.nbytes(portion) for portion in range(len(self.portions))]
        width = self._width
        self.payload = torch.zeros((sum(self._sizes) // width, width), dtype=torch.uint8)
        self._moved, self._encoded = set[int](), set[int]()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The names and shapes of the trained parameters."""
        return tuple(Parameter(name=t.name, shape=tuple(t.parameter.shape)) for t in self._all)

    @property
    def weights(self) -> dict[str, Leaf]:
        """The sea's weights by name."""
        return {each.name: each.weights for each in self._all}

    @property
    def momentum(self) -> dict[str, Leaf]:
        """The sea's momentum by name."""
        return {each.name: each.momentum for each in self._all}

    def nbytes(self, portion: int) -> int:
        """Return the size of a portion's payload."""
        return sum(self._nbytes(t.count) for t in self._of(portion))

    def payload_of(self, portion: int) -> torch.Tensor:
        """Return the part of ``payload`` that is a portion's, flat."""
        return self.payload[self._rows_of(portion)].view(-1)

    def _rows_of(self, portion: int) -> slice:
        width = self.payload.shape[1]
        first = sum(self._sizes[:portion]) // width
        return slice(first, first + self._sizes[portion] // width)

    def load(self, read: Callable[[Mapping[str, dict[str, Leaf]]], object]) -> None:
        """Let ``read`` fill the sea's weights and momentum, by ``weights`` and ``momentum``."""
        read({"weights": self.weights, "momentum": self.momentum})
        self._moved.update(range(len(self.portions)))

    def tell_touched(self, touched: Callable[[torch.Tensor, Rows], None]) -> None:
        """Tell which rows have changed since the last call, so that a snapshot reads no others."""
        for portion in range(len(self.portions)):
            rows: Rows = slice(None) if portion in self._moved else []
            for each in self._of(portion):
                for leaf in (each.weights, each.momentum):
                    _tell(touched, local_of(leaf), rows)
        for portion in self._encoded:
            _tell(touched, self.payload, self._rows_of(portion))
        _tell(touched, self.payload, [])
        self._moved, self._encoded = set(), set()

    def begin(self) -> None:
        """Make the present parameters the sea's weights; the momentum is zero."""
        for each in self._all:
            _copy(each.parameter, each.weights)
            for box in local_boxes_of(each.name, each.momentum):
                box.local.zero_()
        self._moved.update(range(len(self.portions)))

    def take_weights(self) -> None:
        """Make the sea's weights the parameters: the island's own progress is dropped."""
        for each in self._all:
            _copy(each.weights, each.parameter)

    def digest_of_weights(self) -> str:
        """Return the digest of all of the sea's weights; collective."""
        found = self._digests(range(len(self.portions)), kinds=("weights",))
        return _digest(found)

    def digests(self, portions: Sequence[int]) -> list[str]:
        """Return the digest of the sea's weights and momentum of each portion; collective.

        It does not depend on the mesh. Raises ``MismatchError`` if replicas differ.
        """
        return self._digests(portions, kinds=("weights", "momentum"))

    def _digests(self, portions: Sequence[int], *, kinds: Sequence[str]) -> list[str]:
        leaves = {
            f"{kind}.{each.name}": getattr(each, kind)
            for portion in portions
            for each in self._of(portion)
            for kind in kinds
        }
        found = combined(self._ranks.gather(shares_of(leaves)), differs=_differ)
        return [
            _digest(f"{name} {found.get(name, '')}" for name in self._names(portion, kinds))
            for portion in portions
        ]

    def _names(self, portion: int, kinds: Sequence[str]) -> Iterator[str]:
        return (f"{kind}.{each.name}" for each in self._of(portion) for kind in kinds)

    def encode(self, portion: int) -> bytes:
        """Put the payload of a portion's progress into ``payload``, and return it; collective.

        Each rank encodes its share of the blocks. Raises ``NotFiniteError`` on all ranks for
        progress that is not finite.
        """
        ranks, at = self._ranks, 0
        found = torch.zeros(self.nbytes(portion), dtype=torch.uint8)
        fault = ""
        for each in self._of(portion):
            sent = self._sent(each)
            mine = payload.pieces(each.count, ranks.size)[ranks.rank]
            try:
                data = self._encode([values[mine] for values in sent])
            except SeaError as error:
                fault, data = fault or f"{each.name}: {error}", b""
            first = at + self._nbytes(mine.start)
            if data:
                found[first : first + len(data)] = torch.frombuffer(
                    bytearray(data), dtype=torch.uint8
                )
            at += self._nbytes(each.count)
        if faults := [str(said) for said in ranks.gather(fault) if said]:
            raise NotFiniteError(faults[0])
        ranks.sum_(found)
        self.payload_of(portion).copy_(found)
        self._encoded.add(portion)
        return found.numpy().tobytes()

    def adopt(self, merge: Merge, data: Sequence[bytes]) -> None:
        """Move the sea's weights by a merge, and the parameters with them; collective.

        ``data`` are the payloads of the merge in order, at rank 0; other ranks give none. Own
        progress that is not in the merge stays: *parameter = weights - progress*.
        """
        at = 0
        for each in self._of(merge.portion):
            span = _Span.of(each)
            rooms: list[Floats] = []
            for first, last, rows in self._rows(each, merge, data, at):
                here = span.within(first, last)
                n = min(each.count, last * payload.BLOCK) - first * payload.BLOCK
                if here is None:
                    continue
                to, cut = here
                found = self._decode(rows, merge, n, cut)
                rooms = rooms or [span.room() for _ in found]
                for room, values in zip(rooms, found, strict=True):
                    room[to] = values
            self._apply(each, span, rooms, has_own=merge.own >= 0)
            at += self._nbytes(each.count)
        self._moved.add(merge.portion)

    # -- the arithmetic, which `PairTensors` replaces --------------------------------------------

    @property
    def _width(self) -> int:
        """The bytes of a block of a payload."""
        return payload.row_bytes(self._islands.bits)

    def _sent(self, each: SeaParameter) -> Sequence[Floats]:
        """Return what a payload holds of a parameter, whole and flat; collective."""
        return (progress(each),)

    def _encode(self, values: Sequence[Floats]) -> bytes:
        """Return the payload of a range of blocks."""
        return payload.encode(values[0], self._islands.bits)

    def _decode(
        self, rows: Sequence[memoryview], merge: Merge, n: int, cut: slice
    ) -> Sequence[Floats]:
        """Return what `_move` needs, and last the own work if the merge has it."""
        bits, parts = self._islands.bits, list(zip(rows, merge.weights, strict=True))
        mean = payload.mean(parts, whole=merge.whole, bits=bits, n=n, rows=cut)
        if merge.own < 0:
            return (mean,)
        return mean, payload.value(rows[merge.own], bits, n, rows=cut)

    def _move(self, weights: Floats, momentum: Floats, found: Sequence[Floats]) -> None:
        """Move weights and momentum, in place."""
        stepped(weights, momentum, found[0], self._islands.outer)

    # -- inside ----------------------------------------------------------------------------------

    def _nbytes(self, n: int) -> int:
        return payload.rows_of(n) * self._width

    def _rows(
        self, each: SeaParameter, merge: Merge, data: Sequence[bytes], at: int
    ) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Yield the payloads of a parameter in ranges of blocks, on all ranks."""
        width, count = self._width, len(merge.weights)
        rows = payload.rows_of(each.count)
        step = max(1, _PIECE_BYTES // (width * max(count, 1)))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            cut = slice(at + first * width, at + last * width)
            if self._ranks.size == 1:
                yield first, last, [memoryview(one)[cut] for one in data]
                continue
            room = torch.zeros((count, (last - first) * width), dtype=torch.uint8)
            for number, one in enumerate(data):
                room[number] = torch.frombuffer(bytearray(one[cut]), dtype=torch.uint8)
            self._ranks.broadcast(room)
            yield first, last, [memoryview(row.numpy()) for row in room]

    def _apply(
        self, each: SeaParameter, span: _Span, found: Sequence[Floats], *, has_own: bool
    ) -> None:
        if not found:
            return  # nothing of the parameter is here
        boxes = zip(
            local_boxes_of(each.name, each.parameter),
            local_boxes_of(each.name, each.weights),
            local_boxes_of(each.name, each.momentum),
            strict=True,
        )
        for local, weights, momentum in boxes:
            g, m = _flat(weights), _flat(momentum)
            kept = g - _flat(local)
            values = [span.box(room, local) for room in found]
            if has_own:
                kept -= values[-1]
            self._move(g, m, values)
            for box, numbers in ((weights, g), (momentum, m), (local, g - kept)):
                box.local.copy_(torch.from_numpy(numbers).view(box.local.shape))

    def _of(self, portion: int) -> Sequence[SeaParameter]:
        found = self.portions[portion]
        return self._all[found.start : found.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The range of blocks, ``first`` to ``last``, in which this rank's part of a tensor lies."""

    shape: tuple[int, ...]
    count: int
    first: int
    last: int

    @staticmethod
    def of(each: SeaParameter) -> _Span:
        shape = tuple(each.parameter.shape)
        ends = [_ends(box, shape) for box in local_boxes_of(each.name, each.parameter)]
        low = min((first for first, _ in ends), default=0)
        high = max((end for _, end in ends), default=0)
        return _Span(
            shape=shape,
            count=each.count,
            first=low // payload.BLOCK,
            last=payload.rows_of(high),
        )

    def room(self) -> Floats:
        """Return zeros for the numbers of the range."""
        last = min(self.count, self.last * payload.BLOCK)
        return np.zeros(max(0, last - self.first * payload.BLOCK), np.float32)

    def within(self, first: int, last: int) -> tuple[slice, slice] | None:
        """Return where blocks ``first`` to ``last`` lie in `room`, and which of them those are."""
        low, high = max(first, self.first), min(last, self.last)
        if low >= high:
            return None
        begin, end = self.first * payload.BLOCK, min(self.count, high * payload.BLOCK)
        return slice(low * payload.BLOCK - begin, end - begin), slice(low - first, high - first)

    def box(self, values: Floats, box: LocalBox) -> Floats:
        """Return the numbers of a box, flat, from those of the range."""
        first, _ = _ends(box, self.shape)
        strides = [4 * stride for stride in _strides(self.shape)]
        at = values[first - self.first * payload.BLOCK :]
        found = np.lib.stride_tricks.as_strided(at, shape=box.box.shape, strides=strides)
        return np.ascontiguousarray(found).reshape(-1)


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _ends(box: LocalBox, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a box in the flat tensor, and the one behind its last."""
    pairs = list(zip(box.box.offset, box.box.shape, _strides(shape), strict=True))
    first = sum(offset * stride for offset, _, stride in pairs)
    return first, first + sum((size - 1) * stride for _, size, stride in pairs) + 1


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained parameters of the tracked modules by name, each once."""
    seen = set[int]()
    for name, value in leaves_of(state):
        module = module_of(value)
        if isinstance(module, ModelParts):
            raise ConfigError(
                f"run.track({name}=...): the stages of a pipeline cannot be an island; give "
                "Mesh(pp=1) and the whole model"
            )
        if not isinstance(module, nn.Module):
            continue
        for own, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                fqn = clean(join(name, own))
                _check(fqn, parameter)
                yield fqn, parameter
    if not seen:
        raise ConfigError(
            "an island has nothing to merge: track a module with trainable parameters, "
            "run.track(model=...)"
        )


def _check(fqn: str, parameter: torch.Tensor) -> None:
    if parameter.dtype is not torch.float32:
        raise ConfigError(
            f"{fqn} is {str(parameter.dtype).removeprefix('torch.')}: islands merge float32 "
            "parameters; keep float32 weights and compute in the other type, as with "
            "torch.autocast or MixedPrecisionPolicy(param_dtype=...)"
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"{fqn} is not dense: islands merge dense parameters; make it one")
    if parameter.device.type != "cpu":
        raise ConfigError(
            f"{fqn} is on {parameter.device}: islands train on the CPU in this version; give "
            "Mesh(device='cpu'), or leave islands out"
        )


def _trained(name: str, parameter: torch.Tensor) -> SeaParameter:
    weights, momentum = (empty_like(parameter, dtype=torch.float32) for _ in range(2))
    each = SeaParameter(
        name=name,
        parameter=parameter,
        weights=weights,
        momentum=momentum,
        count=parameter.numel(),
    )
    _copy(parameter, weights)
    for box in local_boxes_of(name, momentum):
        box.local.zero_()
    return each


def _copy(source: Leaf, target: Leaf) -> None:
    pairs = zip(local_boxes_of("", source), local_boxes_of("", target), strict=True)
    for there, here in pairs:
        here.local.copy_(there.local)


def _tell(touched: Callable[[torch.Tensor, Rows], None], tensor: torch.Tensor, rows: Rows) -> None:
    is_large = tensor.nbytes >= LEAST_BYTES and tensor.ndim > 0 and tensor.is_contiguous()
    if is_large and tensor[0].nbytes >= LEAST_ROW_BYTES:
        touched(tensor, rows)


def _flat(box: LocalBox) -> Floats:
    """Return a copy of a box's numbers, of one dimension."""
    found: Floats = box.local.reshape(-1).numpy().copy()
    return found


def progress(each: SeaParameter) -> Floats:
    """Return the island's own progress of a whole parameter, flat; collective if it is sharded."""
    own = empty_like(each.weights, dtype=torch.float32)
    boxes = (local_boxes_of(each.name, leaf) for leaf in (own, each.weights, each.parameter))
    for target, weights, local in zip(*boxes, strict=True):
        torch.sub(weights.local, local.local, out=target.local)
    assert isinstance(own, torch.Tensor)
    found: Floats = whole(own).reshape(-1).numpy()
    return found


def _digest(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _differ(name: str, rank: int, other: int) -> MismatchError:
    return MismatchError(
        f"{name}: ranks {rank} and {other} hold different weights of the sea; restore an earlier "
        "checkpoint"
    )
