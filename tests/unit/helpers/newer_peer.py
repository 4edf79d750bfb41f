"""A peer of a later version, which raises an error with an unknown code."""

from __future__ import annotations

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.transport import Request


class NewerError(CkptError):
    """Something happened that only a later version has a class for."""

    code = "HF999"
    remedy = "None is needed."


def newer_handler(request: Request) -> None:
    """Raise a `NewerError` for every request."""
    raise NewerError(f"{request.op}: told by a later version")
