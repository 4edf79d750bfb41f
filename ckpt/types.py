"""The type of JSON values, and the registration of structs with msgspec. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

Json = Any
"""A value made of None, bool, int, float, str, and lists and string-keyed dicts of them."""


def learn(namespace: Mapping[str, object]) -> None:
    """Register a module's structs with msgspec: call it at the module's end with `globals()`.

    msgspec 0.22 otherwise does so at the first decoding. Two threads that decode a type for the
    first time at once then end the process with SIGSEGV: one uses what the other has half filled
    in.
    """
    for kind in list(namespace.values()):
        ours = isinstance(kind, type) and kind.__module__ == namespace["__name__"]
        if ours and issubclass(kind, msgspec.Struct):  # type: ignore[arg-type]
            msgspec.json.Decoder(kind)
