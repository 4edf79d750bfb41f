"""Names for the integers and strings that must not be mixed up. Pure."""

from typing import Any, NewType

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
