"""The world of real processes: it starts a scenario's job here, watches it and strikes it."""

from holdfast.tools.chaos.real.world import Calm, run, undisturbed

__all__ = ["Calm", "run", "undisturbed"]
