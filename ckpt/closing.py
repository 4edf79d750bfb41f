"""A base class that makes a context manager of an object with `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closed at the end of its ``with`` block, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; a second call is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
