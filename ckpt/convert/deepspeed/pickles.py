"""Reading of the ``.pt`` files that DeepSpeed writes, without DeepSpeed and without running code.

The pickles name a few classes of DeepSpeed. They are read as inert stand-ins; any other class is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.ckpt.convert.torch_save import load_file
from holdfast.ckpt.errors import CorruptError, StateError


class ZeroStage(int):
    """The number of a stage, in the place of DeepSpeed's enumeration."""


class SliceAddress:
    """Start and count of a parameter's part, in the place of DeepSpeed's dataclass."""


class LossScale:
    """The attributes of a loss scaler, in the place of DeepSpeed's classes."""


_SCALERS: Final = "deepspeed.runtime.fp16.loss_scaler"

STAND_INS: Final[tuple[tuple[type, str], ...]] = (
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SliceAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (LossScale, f"{_SCALERS}.LossScaler"),
    (type("DynamicLossScale", (LossScale,), {}), f"{_SCALERS}.DynamicLossScaler"),
)


class PickledState:
    """The content of a file: a dict, with the file's name for errors about its fields."""

    def __init__(self, path: Path, content: Mapping[str, Any], *, file_bytes: int) -> None:
        self.path, self.content, self.file_bytes = path, content, file_bytes

    @classmethod
    def load(cls, path: Path) -> PickledState:
        """Read a file, its tensors mapped.

        Raises ``StateError`` naming a class that is refused, ``CorruptError`` for other content.
        """
        content, file_bytes = load_file(path, f"DeepSpeed file {path}", stand_ins=STAND_INS)
        if not isinstance(content, Mapping):
            raise CorruptError(
                f"{path}: holds a {type(content).__name__}, a dict is needed; restore it from a "
                "copy"
            )
        return cls(path, content, file_bytes=file_bytes)

    def within(self, key: str) -> PickledState:
        """Return the dict at ``key``."""
        found = self.need(key, Mapping)
        return PickledState(self.path, found, file_bytes=self.file_bytes)

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the field ``key``. Raises ``CorruptError`` if it is missing or of another type."""
        if key not in self.content:
            raise self.damaged(f"has no {key!r}")
        return self._checked(key, kind)

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the field ``key``, or None if there is none."""
        return None if self.content.get(key) is None else self._checked(key, kind)

    def _checked(self, key: str, kind: type | tuple[type, ...]) -> Any:
        found = self.content[key]
        if not isinstance(found, kind):
            raise self.damaged(f"{key!r} is a {type(found).__name__}")
        return found

    def damaged(self, fault: str) -> CorruptError:
        """Return the error for content that DeepSpeed does not write."""
        return CorruptError(f"{self.path}: {fault}; restore the file from a copy")

    def refused(self, found: str, remedy: str) -> StateError:
        """Return the error for content that is not converted."""
        return StateError(f"{self.path}: {found}; {remedy}")
