"""The world of real processes: a scenario's job is started on this machine, watched and hurt."""

from holdfast.tools.chaos.real.world import Calm, run, undisturbed

__all__ = ["Calm", "run", "undisturbed"]
