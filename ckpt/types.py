"""Distinct types for integers and strings that must not be mixed up. Pure."""

from collections.abc import Mapping
from typing import Any, NewType

import msgspec

Rank = NewType("Rank", int)
"""Index of a trainer worker within one generation."""

Step = NewType("Step", int)
"""Count of completed optimizer steps; also the policy version of the weights at that point."""

Generation = NewType("Generation", int)
"""Membership number of a run; only grows. Zero means "before the first"."""

NodeName = NewType("NodeName", str)
"""Name of a failure domain: a machine, or the set of processes that stands for one."""


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
