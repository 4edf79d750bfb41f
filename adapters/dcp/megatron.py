"""Megatron-core's additions to a DCP directory: a file of common values, and objects of its own.

Megatron's ``torch_dist`` directories are DCP's, with ``metadata.json`` beside ``.metadata``, and
with ``common.pt``, a pickle of what all ranks share. It names classes of argparse and Megatron.
This unpickler calls none of them: an object of an unknown class becomes an `InertObject`, which is
left out and reported.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.adapters.dcp.metadata import PICKLE_FAULTS, InertObject, check_memo
from holdfast.ckpt.convert.torch_save import ZIP_FAULTS
from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.store.base import SMALL_FILE_BYTES
from holdfast.ckpt.store.regular import read_regular
from holdfast.ckpt.types import Json

CONFIG: Final = "metadata.json"
COMMON: Final = "common.pt"
PREFIX: Final = "common."

_RUN_STATES: Final = frozenset({"rng_state", "rerun_state_machine_state"})
_BACKEND: Final = "torch_dist"
_CONFIG_BYTES: Final = 1 << 20
_MOST_ENTRIES: Final = 1_000_000
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonState:
    """The common values of a Megatron directory, its iteration, and words about what is left out.

    Names start with ``common.``.
    """

    values: Mapping[str, Json] = field(default_factory=dict)
    iteration: int | None = None
    told: tuple[str, ...] = ()


def is_megatron(directory: Path) -> bool:
    """Say whether Megatron-core wrote a directory in its format ``torch_dist``."""
    path = directory / CONFIG
    if not path.is_file():
        return False
    try:
        said = json.loads(read_regular(path, most_bytes=_CONFIG_BYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("sharded_backend") == _BACKEND


def is_disposable(fqn: str) -> bool:
    """Say whether an object is of use to the same run of Megatron only: a generator's state."""
    name = fqn.partition("/")[0]
    return name in _RUN_STATES or name.endswith("._extra_state")


def read_common(directory: Path) -> CommonState:
    """Return the common values of a directory; none if it has no such file.

    Raises ``CorruptError`` for a file that is not as torch.save writes it.
    """
    path = directory / COMMON
    if not path.is_file():
        return CommonState()
    data = _pickle_of(path)
    try:
        check_memo(data)
        found = _CommonUnpickler(io.BytesIO(data)).load()
    except PICKLE_FAULTS as error:
        raise CorruptError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); restore it from a copy"
        ) from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: holds no dict; restore it from a copy")
    return _described(path, found)


def _described(path: Path, found: dict[Any, Any]) -> CommonState:
    cleaner = _Cleaner(str(path))
    values: dict[str, Json] = {}
    for key, value in found.items():
        name = f"{PREFIX}{key}"
        for kept in cleaner.kept(value, name):
            try:
                values[name] = plain.encode(kept, name)
            except StateError as error:
                cleaner.left.append(str(error).partition(" (")[0])
    iteration = found.get("iteration")
    known = isinstance(iteration, int) and not isinstance(iteration, bool) and iteration >= 0
    told: tuple[str, ...] = ()
    if cleaner.left:
        more = ", …" if len(cleaner.left) > _SHOWN else ""
        told = (
            f"{path}: {len(cleaner.left)} values were left out, their classes are not plain: "
            + ", ".join(cleaner.left[:_SHOWN])
            + more,
        )
    return CommonState(values=values, iteration=iteration if known else None, told=told)


def _pickle_of(path: Path) -> bytes:
    """Return the pickle inside of a file that torch.save wrote."""
    data = read_regular(path, most_bytes=SMALL_FILE_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = [part for part in archive.infolist() if part.filename.endswith("/data.pkl")]
            if len(parts) != 1 or parts[0].compress_type != zipfile.ZIP_STORED:
                raise CorruptError(
                    f"{path}: is not as torch.save writes it; restore it from a copy"
                )
            return archive.read(parts[0])
    except ZIP_FAULTS as error:
        raise CorruptError(
            f"{path}: is no archive of torch.save ({error}); restore it from a copy"
        ) from error


class _CommonUnpickler(pickle.Unpickler):
    """Knows dicts and types of torch; gives every other class a stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a data type of torch, or a new stand-in."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("collections", "OrderedDict"):
            return type(name, (dict,), {})
        return type(name, (InertObject,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """Return a stand-in for the memory of a tensor."""
        return InertObject()


class _Cleaner:
    """Takes stand-ins out of a tree. ``left`` names them by path and class."""

    def __init__(self, origin: str) -> None:
        self._origin, self._entries = origin, 0
        self.left: list[str] = []

    def kept(self, value: object, path: str, depth: int = 0) -> Iterator[object]:
        """Yield the value without the stand-ins in it; nothing for a stand-in."""
        self._entries += 1
        if self._entries > _MOST_ENTRIES or depth > plain.MAX_DEPTH:
            raise CorruptError(
                f"{self._origin}: more than {_MOST_ENTRIES} entries or {plain.MAX_DEPTH} levels; "
                "restore it from a copy"
            )
        if isinstance(value, InertObject):
            if value.origin != "argparse.Namespace":
                self.left.append(f"{path} ({value.origin})")
                return
            value = dict(vars(value))
        if isinstance(value, dict):
            yield {
                key: kept
                for key, item in value.items()
                for kept in self.kept(item, f"{path}.{key}", depth + 1)
            }
        elif isinstance(value, list | tuple):
            items = [
                kept
                for number, item in enumerate(value)
                for kept in self.kept(item, f"{path}.{number}", depth + 1)
            ]
            yield items if isinstance(value, list) else tuple(items)
        else:
            yield value
