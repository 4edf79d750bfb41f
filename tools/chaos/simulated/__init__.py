"""The simulated world of scenarios: virtual time, and the decisions of production code."""

from holdfast.tools.chaos.simulated.world import run

__all__ = ["run"]
